"""A comparison as the Python program that repeats it with `pop_core` alone."""

import re

LINE = 100  # characters of a prompt in one line of the program


def snippet(result: dict) -> str:
    """The program for `Comparison.to_dict()`. Every value is written by `repr`, so no prompt can become code."""
    run, cut = result["dense"], result["pruned"]["plan"]["prefill"]
    sampling = ", ".join(f"{name}={_value(value)}" for name, value in run["sampling"].items())
    plan = "" if cut is None else "PrefillCut({})".format(", ".join(f"{k}={v!r}" for k, v in cut.items()))
    return f"""from pop_core import Engine, Plan, PrefillCut, Sampling, kv_fit, load_model
from pop_core.compare import compare

prompt = {_text(run["prompt"])}
engine = Engine(load_model({run["model"]!r}, device={run["device"]!r}, dtype={run["dtype"]!r}))
plan = Plan({plan})
sampling = Sampling({sampling})

kv_fit.ensure(engine, plan)  # fits the projections on first use, if the plan needs them
result = compare(engine, prompt, plan, sampling=sampling, chat={run["chat"]!r}, repeats={_repeats(result)})
print("dense: ", result.dense["text"])
print("pruned:", result.pruned["text"])
print("prefill speed-up:", result.prefill_speedup)
"""


def _repeats(result: dict) -> int:
    return max(1, result["prefill_repeats"])


def _value(value) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def _text(text: str) -> str:
    """A string literal of lines that fit a screen."""
    pieces = re.findall(rf"[^\n]{{0,{LINE}}}[ \n]|[^\n]{{1,{LINE}}}", text)
    if len(text) < LINE and "\n" not in text:
        return repr(text)
    return "(\n" + "".join(f"    {piece!r}\n" for piece in pieces) + ")"
