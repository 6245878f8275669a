"""The models in memory, shared by all visitors of a page and addressed by name.

A failed load changes nothing. A run keeps the engine that it started with, even if the registry lets go of it.
"""

import threading
from collections import OrderedDict

from .engine import Engine
from .errors import NotEnoughMemory
from .loading import load_model

KEPT = 2  # models kept at once, if memory allows


class Registry:
    """At most `KEPT` engines, the least recently used one let go first."""

    def __init__(self, load=load_model):
        self._load = load
        self._engines: OrderedDict[tuple, Engine] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, device: str = "auto", dtype: str = "auto", progress=None) -> Engine:
        """The engine of a model, loaded on first use. Raises the `PopError` of `load_model`.

        When a model does not fit beside the others they are let go first; they load again when somebody asks for them.
        """
        key = name.strip(), device, dtype
        with self._lock:
            if key not in self._engines:
                try:
                    loaded = self._load(*key, progress=progress)
                except NotEnoughMemory:
                    if not self._engines:
                        raise
                    self._engines.clear()
                    loaded = self._load(*key, progress=progress)
                self._engines[key] = Engine(loaded)
                while len(self._engines) > KEPT:
                    self._engines.popitem(last=False)
            self._engines.move_to_end(key)
            return self._engines[key]

    def loaded(self, name: str, device: str = "auto", dtype: str = "auto") -> Engine | None:
        """The engine if it is in memory; never loads."""
        return self._engines.get((name.strip(), device, dtype))
