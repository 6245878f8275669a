"""The app's documented API: one endpoint with plain values in and plain data out."""

import threading

import gradio as gr

from pop_core.plan import CANDIDATES, WIDTH

from . import comparing
from .shared import DEFAULT_MODEL, explain


def compare(
    prompt: str,
    model: str = DEFAULT_MODEL,
    cutoff: float = 20,
    kv: str = "fitted",
    sinks: float = 4,
    boundary: float = 16,
    ratio: float = 0,
    width: float = WIDTH,
    rescore: str = CANDIDATES,
    max_new_tokens: float = 64,
    temperature: float = 0,
    top_p: float = 1,
    top_k: float = 0,
    seed: float = 0,
    stop: str = "",
    style: str = "chat",
    repeats: float = 3,
) -> dict:
    """Answer a prompt dense and pruned, and compare both.

    cutoff: layers that read the prompt. kv: "fitted" or "own"; where nothing is fitted yet the run uses "own", and
    says so in the pruned run's notices and plan. sinks, boundary: prompt tokens, the first and the last ones, that run
    every layer all the same. ratio: share of the FFN channels left out while writing; 0 leaves out none. width: share
    of the channels that each token chooses from anew. rescore: "candidates", "none" (a fixed mask) or "all". stop:
    strings that end the answer, one a line. style: "chat" or "plain". Returns `Comparison.to_dict()`; fails with one
    sentence for values that cannot be used.
    """
    raw = {name: value for name, value in locals().items() if name in comparing.NAMES}
    try:
        *_, last = comparing.perform(raw, threading.Event(), "api")
    except Exception as error:
        raise gr.Error(explain(error), print_exception=False) from None
    return last["result"]
