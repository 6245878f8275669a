"""The README's tables on pruning channels while writing: what had to be reached, quality by ratio, a mixture."""

import datetime

from measuring import HELD_OUT, pop_core, quality

RATIOS = (0.2, 0.4, 0.6)
METHODS = {
    "fixed mask": "--rescore none",
    "candidates 0.1": "--candidate-width 0.1",
    "candidates 0.2": "--candidate-width 0.2",
    "candidates 0.4": "--candidate-width 0.4",
    "all re-scored": "--rescore all",
    "GRIFFIN": "--baseline griffin",
    "Wanda-sp": "--baseline wanda-sp",
    "FLAP": "--baseline flap",
    "ShortGPT": "--baseline shortgpt",
}
PLAN = "--prune-ratio 0.4 --candidate-width 0.1"
SEGMENTS = "--segments 6"
MIXTURE, MIXTURE_TEXT = "stories-moe", "assets/heldout/stories.txt"
MIXTURE_COUNTS = "--prompt-tokens 192 --new-tokens 48"


def reached() -> str:
    """What had to be reached while writing."""
    step = pop_core("bench", "decode", *PLAN.split())
    both = "--cutoff 20 --kv fitted --sinks 4 --boundary 16 --prune-ratio 0.2"
    answer = pop_core(*f"bench answer --tokens 1024 --new-tokens 64 {both}".split())
    rows = [
        (
            f"`bench decode {PLAN}`: `speedup_vs_stock`",
            "at least 1.40",
            step["speedup_vs_stock"],
        ),
        ("the same: `speedup_vs_dense`", "at least 1.15", step["speedup_vs_dense"]),
        ("the same: `fraction_of_limit`", "at least 0.90", step["fraction_of_limit"]),
        ("the same: `rescore_overhead`", "at most 0.04", step["rescore_overhead"]),
        (
            "the same: `overhead_vs_fixed_mask`, with the candidates' own weights",
            "reported",
            step["overhead_vs_fixed_mask"],
        ),
        ("the same: `partition_steps`, slicing and scoring in dense steps", "at most 6", step["partition_steps"]),
        (f"`bench answer --tokens 1024 --new-tokens 64 {both}`", "at least 1.35", answer["speedup_vs_stock"]),
    ]
    body = "\n".join(f"| {what} | {least} | {value:.3g} |" for what, least, value in rows)
    steps = ", ".join(
        f"{name} {step[key]:.1f} ms"
        for name, key in (
            ("stock", "ms_stock"),
            ("dense", "ms_dense"),
            ("candidates", "ms"),
            ("fixed mask", "ms_fixed_mask"),
        )
    )
    return (
        f"| what | wanted | measured |\n|---|---|---|\n{body}\n\nOne step, median: {steps}; the dense FFNs are "
        f"{step['ms_dense_ffn']:.1f} ms of it and re-scoring {step['rescore_ms']:.2f} ms. Once for a prompt of 256 "
        f"tokens: scoring {step['scoring_ms']:.0f} ms, slicing {step['slicing_ms']:.0f} ms. Bytes read allow "
        f"{step['limit_speedup']:.2f}x over dense. {step['machine']}, {step['dtype']}, {datetime.date.today()}."
    )


def by_ratio() -> str:
    """KL and agreement of every method at every ratio."""
    cells = {
        (name, ratio): quality(HELD_OUT, f"--prune-ratio {ratio} {option} {SEGMENTS}")
        for name, option in METHODS.items()
        for ratio in RATIOS
    }
    head = "| method | " + " | ".join(f"ratio {ratio}" for ratio in RATIOS) + " |"
    lines = [head, "|---|" + "---|" * len(RATIOS)]
    for name in METHODS:
        shown = [f"{cells[name, r]['kl']:.4f} ({cells[name, r]['agreement']:.2f})" for r in RATIOS]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    first = next(iter(cells.values()))
    return "\n".join(lines) + (
        f"\n\nKL in nats a token (agreement), {first['segments']} segments of {first['prompt_tokens']} + "
        f"{first['new_tokens']} tokens, teacher-forced, float32; the dense loss is {first['loss_dense']:.3f}."
    )


def mixture() -> str:
    """The same of the bundled mixture of experts, at one ratio, and of a prefill cut."""
    plans = {name: f"--prune-ratio 0.4 {option}" for name, option in METHODS.items()}
    plans |= {"prefill cut 5 of 8, own K/V": "--cutoff 5 --sinks 4 --boundary 16"}
    rows = {
        name: pop_core("quality", "--model", MIXTURE, "--text", MIXTURE_TEXT, *MIXTURE_COUNTS.split(), *plan.split())
        for name, plan in plans.items()
    }
    lines = ["| method | loss | KL | agreement |", "|---|---|---|---|"]
    first = next(iter(rows.values()))
    lines.append(f"| dense | {first['loss_dense']:.3f} | 0 | 1 |")
    lines += [f"| {name} | {r['loss']:.3f} | {r['kl']:.4f} | {r['agreement']:.3f} |" for name, r in rows.items()]
    counts = f"{first['segments']} segments of {first['prompt_tokens']} + {first['new_tokens']} tokens"
    return "\n".join(lines) + f"\n\n{counts} of `{MIXTURE_TEXT}`, ratio 0.4, float32."


TABLES = {"channels": reached, "ratios": by_ratio, "mixture": mixture}
