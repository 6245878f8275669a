"""Run the README's measurements and write its tables: `python scripts/measure.py [--write] [--only TABLE]`.

Every number comes from a `python -m pop_core` command, run as a reader would run it, or from a recorded result of one.
Without `--write` the tables are only printed. Takes about half an hour on 2 cores; leave the machine alone meanwhile.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pydoc_data.topics import topics

from playwright.sync_api import sync_playwright
from running import CHROMIUM, FLAGS, ROOT, running_app

sys.path.insert(0, str(ROOT))

from channel_tables import TABLES as CHANNEL_TABLES
from measuring import HELD_OUT, pop_core, quality, replace
from picture_tables import TABLES as PICTURE_TABLES

from pop_core.recorded import RECORDED, load

OWN_20, OWN_15 = "--cutoff 20", "--cutoff 15"
FITTED_20, FITTED_20_SINKS, FITTED_20_WIDE, FITTED_15_WIDE = (
    "--cutoff 20 --kv fitted",
    "--cutoff 20 --kv fitted --sinks 4",
    "--cutoff 20 --kv fitted --sinks 4 --boundary 16",
    "--cutoff 15 --kv fitted --sinks 4 --boundary 64",
)
PLANS = ["--cutoff 29", OWN_20, FITTED_20, FITTED_20_SINKS, FITTED_20_WIDE, OWN_15, FITTED_15_WIDE]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in README.md")
    tables = {"reached": reached, "quality": held_out_quality, "topics": topics_quality, "importance": importance}
    tables |= CHANNEL_TABLES | PICTURE_TABLES
    parser.add_argument("--only", choices=tables, help="this table alone")
    options = parser.parse_args()
    for name, make in tables.items():
        if options.only in (None, name):
            text = make()
            print(f"\n[{name}]\n{text}")
            if options.write:
                replace(name, text)
    return 0


def held_out_quality() -> str:
    return quality_table({plan: quality(HELD_OUT, plan) for plan in PLANS})


def topics_quality() -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n\n".join(topics.values()))
        file.flush()
        return quality_table({plan: quality(file.name, plan) for plan in PLANS})


def importance() -> str:
    """The table of the analysis: speed from a run of now, what it found from the recorded results."""
    timed = pop_core("importance", "--samples", "32")
    results = {name: load(RECORDED / f"importance-{name}.json")[0] for name in ("smollm2", "gemma3-270m")}
    first_words, seconds, interactive = visible_after()
    kept, short = (peak_gigabytes(option) for option in ("--no-recompute", "--recompute"))
    lines = ["| what | wanted | `smollm2` | `gemma3-270m` |", "|---|---|---|---|"]
    for what, least, value in (
        ("writing/reading importance, last third over first third", "at least 5", lambda r: r["depth_contrast"]),
        ("Spearman of gates against ablation, reading", "aim 0.8", lambda r: r["spearman_prefill"]),
        ("the same, writing", "reported", lambda r: r["spearman_decode"]),
        ("ShortGPT's block influence against ablation, reading", "reported", _influence("prefill")),
        ("the same, writing", "reported", _influence("decode")),
        ("recommended cutoff at 5% tolerance", "reported", lambda r: r["recommended_cutoff"]),
    ):
        lines.append(f"| {what} | {least} | " + " | ".join(f"{value(r):.3g}" for r in results.values()) + " |")
    lines.append(f"| `forward_equivalents` of an analysis | at most 4 | {timed['forward_equivalents']:.2f} | |")
    lines.append(f"| peak of the process, one sample of 1,984 + 64 tokens | 8 GB | {kept:.1f} GB | |")
    lines.append(f"| the same with `--recompute` | 8 GB | {short:.1f} GB | |")
    lines.append(f"| a recorded result is visible after opening the page | 1 s | {seconds:.2f} s | |")
    said = "; ".join(
        f"{name}: {r['samples']} samples, {r['ablation']['samples']} of them ablated, {r['date'][:10]}, {r['machine']}"
        for name, r in results.items()
    )
    return "\n".join(lines) + (
        f"\n\nSamples of {timed['prompt_tokens']} + {timed['new_tokens']} tokens; {said}; the last four rows "
        f"{datetime.date.today()}, {timed['machine']}. All {timed['dtype']}. The page's first words are there after "
        f"{first_words:.2f} s, its interactive figures after {interactive:.2f} s."
    )


def _influence(stage: str):
    return lambda result: result["ablation"]["spearman"][f"influence_ablation_{stage}"]


def visible_after(rounds: int = 5) -> list[float]:
    """Seconds from opening the page Importance to its first words, its recorded heatmap with its sentence, and its
    interactive figure; medians."""
    marks = (
        "document.querySelector('.intro')",
        "document.querySelector('.preview i') && document.querySelector('#layers_note p')",
        "document.querySelector('#layers .heatmaplayer image')",
    )
    times = []
    with running_app() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        time.sleep(10)  # the default model is loaded in the background meanwhile
        for _ in range(rounds):
            page = browser.new_page()
            page.goto(f"{address}importance", wait_until="commit")
            seen = [page.wait_for_function(f"{mark} && performance.now()", polling="raf") for mark in marks]
            times.append([moment.json_value() / 1e3 for moment in seen])
            page.close()
    return [statistics.median(column) for column in zip(*times, strict=True)]


def peak_gigabytes(option: str) -> float:
    """The most memory that one analysis of a long sample holds, the model and Python included."""
    arguments = ("importance", "--samples", "1", "--prompt-tokens", "1984", "--new-tokens", "64", option)
    process = subprocess.Popen([sys.executable, "-m", "pop_core", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return usage.ru_maxrss * 1024 / 1e9


def reached() -> str:
    """The table of what had to be reached."""
    held_out = {plan: quality(HELD_OUT, plan) for plan in PLANS}
    prefill = pop_core("bench", "prefill", "--tokens", "1024", *OWN_20.split())
    decode = pop_core("bench", "decode")
    own = held_out[OWN_20]["kl"]
    rows = [
        ("`bench prefill --tokens 1024 --cutoff 20`: `speedup_vs_stock`", "at least 1.50", prefill["speedup_vs_stock"]),
        ("the same: `fraction_of_limit`", "at least 0.93", prefill["fraction_of_limit"]),
        ("`bench decode` (dense): `speedup_vs_stock`", "at least 1.15", decode["speedup_vs_stock"]),
        ("KL, fitted (4, 1) over own (0, 1), cutoff 20", "at most 0.25", held_out[FITTED_20_SINKS]["kl"] / own),
        ("KL, fitted (4, 16) over own (0, 1), cutoff 20", "at most 0.167", held_out[FITTED_20_WIDE]["kl"] / own),
        ("KL, cutoff 15 fitted (4, 64) over cutoff 20 own", "at most 1", held_out[FITTED_15_WIDE]["kl"] / own),
        ("second start of `app.py` until the page answers", "under 15 s", second_start()),
    ]
    body = "\n".join(f"| {what} | {least} | {value:.3g} |" for what, least, value in rows)
    times = ", ".join(
        f"{name} {prefill[key] / 1e3:.2f} s ({prefill['spread'][variant][0] / 1e3:.2f}-"
        f"{prefill['spread'][variant][1] / 1e3:.2f})"
        for name, key, variant in (
            ("stock", "ms_stock", "stock"),
            ("dense", "ms_dense", "dense"),
            ("cut", "ms", "plan"),
        )
    )
    steps = f"stock {decode['ms_stock']:.1f} ms, ours {decode['ms']:.1f} ms"
    return (
        f"| what | wanted | measured |\n|---|---|---|\n{body}\n\n"
        f"1,024-token prefill, median (range): {times}. One decode step: {steps}. Arithmetic alone allows "
        f"{prefill['limit_speedup']:.2f}x over dense at cutoff 20. "
        f"{prefill['machine']}, {prefill['dtype']}, {datetime.date.today()}."
    )


def quality_table(results: dict[str, dict]) -> str:
    lines = ["| plan | loss | KL | KL, first token | agreement |", "|---|---|---|---|---|"]
    first = next(iter(results.values()))
    lines.append(f"| dense | {first['loss_dense']:.3f} | 0 | 0 | 1 |")
    lines += [
        f"| `{plan}` | {r['loss']:.3f} | {r['kl']:.4f} | {r['first_token_kl']:.4f} | {r['agreement']:.3f} |"
        for plan, r in results.items()
    ]
    counts = f"{first['segments']} segments of {first['prompt_tokens']} + {first['new_tokens']} tokens"
    return "\n".join(lines) + f"\n\n{counts}, teacher-forced, float32."


def second_start() -> float:
    """Seconds from starting `app.py` to its first answer, the model being in the cache already."""
    start = time.perf_counter()
    with running_app():
        return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
