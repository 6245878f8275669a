"""The README's tables on pictures: what had to be reached, and what plans cost in exact answers of `shapes-vl`."""

import datetime

from measuring import pop_core

from pop_core.recorded import RECORDED, load
from pop_core.scene_quality import best_kept

MODEL, PICTURE = "shapes-vl", "assets/examples/describe.png"
KEPT = 8  # of 12 layers: a third is skipped
RECORD = RECORDED / f"scenes-{MODEL}.json"


def reached() -> str:
    """What had to be reached with pictures."""
    result, *_ = load(RECORD)
    plans = result["plans"]
    best = best_kept(plans, KEPT)
    command = f"bench prefill --model {MODEL} --image {PICTURE} --image-tokens 1024 --cutoff {KEPT}"
    read = pop_core(*command.split())
    rows = [
        ("exact answers on held-out scenes, dense", "at least 0.90", best["accuracy_dense"]),
        (
            f"accuracy kept with a third of the layers skipped ({said(best['plan'])})",
            "at least 0.98",
            best["accuracy"] / best["accuracy_dense"],
        ),
        (f"`{command}`: `speedup_vs_stock`", "at least 1.40", read["speedup_vs_stock"]),
        ("the same: `fraction_of_limit`", "reported", read["fraction_of_limit"]),
    ]
    body = "\n".join(f"| {what} | {least} | {value:.3g} |" for what, least, value in rows)
    whole = (read["vision_ms"] + read["ms_stock"]) / (read["vision_ms"] + read["ms"])
    return f"""| what | wanted | measured |
|---|---|---|
{body}

{best["scenes"]} scenes, {best["questions"]:,} questions, {result["machine"]}, {result["date"][:10]}. Reading \
{read["tokens"]:,} tokens, {read["image_tokens"]:,} of them image: stock {read["ms_stock"]:.0f} ms, dense \
{read["ms_dense"]:.0f}, cut {read["ms"]:.0f} (medians). The vision tower before it takes {read["vision_ms"]:.0f} ms, \
which no plan shortens: with it the whole is {whole:.2f}x. \
{read["machine"]}, {read["dtype"]}, {datetime.date.today()}."""


def by_plan() -> str:
    """Exact answers and KL of every recorded plan."""
    result, *_ = load(RECORD)
    plans = result["plans"]
    lines = ["| plan | exact answers | KL | agreement |", "|---|---|---|---|"]
    lines.append(f"| dense | {plans[0]['accuracy_dense']:.3f} | 0 | 1 |")
    lines += [
        f"| {said(found['plan'])} | {found['accuracy']:.3f} | {found['kl']:.4f} | {found['agreement']:.3f} |"
        for found in plans
    ]
    counts = (
        f"{plans[0]['scenes']} scenes, {plans[0]['questions']:,} questions, {plans[0]['tokens']:,} tokens of answers"
    )
    return "\n".join(lines) + (f"\n\n{counts}, teacher-forced, float32. {result['machine']}, {result['date'][:10]}.")


def said(plan: dict) -> str:
    """A plan as its options."""
    cut, channels = plan["prefill"], plan["channels"]
    options = []
    if cut:
        options += [f"--cutoff {cut['cutoff']}"] + ["--kv fitted"] * (cut["kv"] == "fitted")
        options += [f"--sinks {cut['sinks']} --boundary {cut['boundary']}"] * bool(cut["sinks"])
    if channels:
        options.append(f"--prune-ratio {channels['ratio']}")
    return f"`{' '.join(options)}`"


TABLES = {"pictures": reached, "scenes": by_plan}
