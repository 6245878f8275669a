"""POP Studio's inference core: prefill-only pruning, measured. Usable without the app.

>>> from pop_core import Engine, Plan, PrefillCut, load_model
>>> engine = Engine(load_model("smollm2"))
>>> engine.generate("Why is the sky blue?", Plan(PrefillCut(20))).text
"""

from .compare import Comparison, compare
from .engine import Engine
from .errors import PopError
from .loading import load_model
from .plan import DENSE, Plan, PrefillCut
from .run import Run
from .sampling import Sampling

__all__ = [
    "DENSE",
    "Comparison",
    "Engine",
    "Plan",
    "PopError",
    "PrefillCut",
    "Run",
    "Sampling",
    "compare",
    "load_model",
]
