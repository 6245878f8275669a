"""A comparison as the Python program that repeats it with `pop_core` alone."""

import re

LINE = 100  # characters of a prompt in one line of the program
PARTS = {"prefill": "PrefillCut", "channels": "ChannelPruning", "baseline": "Baseline"}  # of a plan


def snippet(result: dict) -> str:
    """The program for `Comparison.to_dict()`. Every value is written by `repr`, so no prompt can become code."""
    run = result["dense"]
    parts = {name: entries for name, entries in result["pruned"]["plan"].items() if entries}
    names = ["Engine", "Plan", "Sampling", *(PARTS[name] for name in parts)]
    modules = ["baselines"] * ("baseline" in parts) + ["kv_fit", "load_model"]
    plan = "".join(f"    {name}={PARTS[name]}({_arguments(entries)}),\n" for name, entries in parts.items())
    calibrate = "baselines.ensure(engine, plan)  # reads calibration text\n" if "baseline" in parts else ""
    return f"""from pop_core import {", ".join(sorted(names) + modules)}
from pop_core.compare import compare

prompt = {_text(run["prompt"])}
{_pictures(run)}engine = Engine(load_model({run["model"]!r}, device={run["device"]!r}, dtype={run["dtype"]!r}))
plan = Plan({f"{chr(10)}{plan}" if plan else ""})
sampling = Sampling({_arguments(run["sampling"])})

kv_fit.ensure(engine, plan)  # fits the projections on first use, if the plan needs them
{calibrate}result = compare(engine, prompt, plan, sampling=sampling, {_options(result)})
print("dense: ", result.dense["text"])
print("pruned:", result.pruned["text"])
print("prefill speed-up:", result.prefill_speedup, "decode speed-up:", result.decode_speedup)
"""


def _pictures(run: dict) -> str:
    """The files that a person is to put beside the program: a result has no more of its pictures than thumbnails."""
    shown = run.get("pictures") or ()
    if not shown:
        return ""
    names = '["picture-1.png"]'
    if len(shown) > 1:
        names = f'[f"picture-{{number}}.png" for number in range(1, {len(shown) + 1})]'
    return f"# put your own files there: the run keeps no more of its pictures than thumbnails\nimages = {names}\n"


def _options(result: dict) -> str:
    run = result["dense"]
    said = f"chat={run['chat']!r}, repeats={_repeats(result)}"
    if run.get("pictures"):
        said += ", images=images"
        said += f", image_tokens={most!r}" if (most := result.get("most_image_tokens")) else ""
    return said


def _arguments(entries: dict) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in entries.items())


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
