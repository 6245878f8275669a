"""What every page shares: the models in memory, which names a visitor may load, errors as sentences.

Nothing here imports torch before a model is asked for, so that a page with recorded results opens at once.
"""

import html
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator

import gradio as gr

from pop_core import recorded
from pop_core.errors import PopError

from .background import watch

MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}  # of every event that runs a model
MAX_CHARACTERS = 200_000  # of a prompt
DEFAULT_MODEL = "smollm2"
EMBEDDED = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3-270m": "Gemma-3-270M (base)",
    "stories-moe": "Stories-MoE, a small mixture of experts",
    "shapes-vl": "Shapes-VL, sees coloured shapes",
}
IMPORTANCE = {
    name: recorded.load(path) for name in EMBEDDED if (path := recorded.RECORDED / f"importance-{name}.json").exists()
}
SCENES = {path.stem.removeprefix("scenes-"): recorded.load(path)[0] for path in recorded.RECORDED.glob("scenes-*.json")}
BEGINNING = 0.0, "Loading the model"
HUB_NAME = r"(https?://)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)+/?"

NO_LOCAL_FILES = (
    f"Local folders and files cannot be opened on a public Space; use {', '.join(EMBEDDED)} or a hub model "
    "as owner/name."
)
UNEXPECTED = "Something went wrong that this page did not foresee; the details are in the server's log."


class Models:
    """The one registry of the process, made on first use, and how far what is being loaded has come."""

    def __init__(self):
        self._registry, self._lock = None, threading.Lock()
        self._loading: dict[str, tuple[float, str]] = {}

    def get(self, name: str, checkpoint=lambda: None):
        """The engine of a model, loaded on first use. Raises what `load_model` raises, `PopError` for a local path on
        a public Space, and what `checkpoint` raises."""
        name = allowed_name(name)

        def report(fraction: float, text: str) -> None:
            checkpoint()
            self._loading[name] = fraction, text

        with self._lock:
            if self._registry is None:
                from pop_core.registry import Registry

                self._registry = Registry()
        try:
            return self._registry.get(name, progress=report)
        finally:
            self._loading.pop(name, None)

    def loaded(self, name: str):
        """The engine if it is in memory; never loads, and never waits for torch to be imported."""
        return self._registry.loaded(str(name or "")) if self._registry else None

    def progress(self, name: str) -> tuple[float, str]:
        """How far the loading of a model has come, whoever asked for it, as (fraction, text)."""
        return self._loading.get(str(name or "").strip(), BEGINNING)


MODELS = Models()


def spec_of(model):
    """The shape of a model in memory or of a recorded one; None for one that nobody has loaded yet."""
    engine = MODELS.loaded(model)
    return engine.spec if engine else IMPORTANCE[model][1] if model in tuple(IMPORTANCE) else None


def watch_loading(name: str, stop: threading.Event) -> Iterator[tuple[float, str]]:
    """Load a model, yielding its progress; returns the engine. Stop takes effect at once."""
    if engine := MODELS.loaded(name):
        return engine
    yield MODELS.progress(name)

    def load(post, checkpoint):
        return MODELS.get(name, checkpoint)

    # another visitor, or the start of the app, may be the one who loads it
    return (yield from watch(load, stop, patient=False, look=lambda: MODELS.progress(name)))


def load_in_background(name: str = DEFAULT_MODEL) -> None:
    """Have a model ready before the first visitor asks for it. A failure is told again when one does."""

    def load():
        try:
            MODELS.get(name)
        except Exception as error:
            explain(error)

    threading.Thread(target=load, daemon=True, name=f"load {name}").start()


def allowed_name(name) -> str:
    """The model's name, or the `PopError` that keeps visitors of a public Space away from the server's files."""
    name = str(name or "").strip()
    if os.environ.get("SPACE_ID") and name not in EMBEDDED:
        local = os.path.exists(os.path.expanduser(name)) or name.lower().endswith(".gguf")
        if local or not re.fullmatch(HUB_NAME, name):
            raise PopError(NO_LOCAL_FILES)
    return name


def explain(error: Exception) -> str:
    """The sentence for an error: also printed on stderr, with a traceback if nobody foresaw it."""
    if isinstance(error, PopError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return str(error)
    traceback.print_exception(error)
    return UNEXPECTED


def warn(sentence: str) -> None:
    """A notice in the corner of the page, beside the sentence in it."""
    gr.Warning(html.escape(sentence), duration=6)
