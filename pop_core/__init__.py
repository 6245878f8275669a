"""POP Studio's inference core: what reading and writing can do without, measured. Usable without the app.

>>> from pop_core import Engine, Plan, PrefillCut, load_model
>>> engine = Engine(load_model("smollm2"))
>>> engine.generate("Why is the sky blue?", Plan(PrefillCut(20))).text
"""

from importlib import import_module

_HOMES = {
    "DENSE": "plan",
    "Baseline": "plan",
    "ChannelPruning": "plan",
    "Engine": "engine",
    "Plan": "plan",
    "PopError": "errors",
    "PrefillCut": "plan",
    "Run": "run",
    "Sampling": "sampling",
    "load_model": "loading",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Import a public name on first use: a page that shows recorded results must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
