"""An analysis as a table, a CSV file and a report that needs nothing but a browser.

In a table a cell is a number, None where it is not finite, or `UNMEASURED`. Shown and written to a file, all three
differ: "NaN" is not "n/a". The names of the CSV's columns are those of the JSON.
"""

import csv
import html
import io
import math

from .findings import (
    ablation_sentence,
    caption,
    curve_sentence,
    facts,
    layers_sentence,
    uncertain,
)
from .importance import BRANCHES, KINDS, STAGES, has_kinds, ratios, skipped_share, total
from .picture_findings import kinds_sentence, overlay_sentence
from .picture_view import has_pictures, heaviest_layer
from .token_findings import tokens_sentence

UNMEASURED = "n/a"
NAMES = {
    "layer": "Layer",
    "image_attention": "Images attention",
    "image_ffn": "Images FFN",
    "image_se": "Images s.e.",
    "text_attention": "Text attention",
    "text_ffn": "Text FFN",
    "text_se": "Text s.e.",
    "prefill_attention": "Reading attention",
    "prefill_ffn": "Reading FFN",
    "prefill_se": "Reading s.e.",
    "decode_attention": "Writing attention",
    "decode_ffn": "Writing FFN",
    "decode_se": "Writing s.e.",
    "ratio": "Writing / reading",
    "skipped_share": "Share skipped as cutoff",
    "cut_kl": "KL as cutoff",
    "prefill_kl": "KL, left out reading",
    "decode_kl": "KL, left out writing",
    "prefill_influence": "Block influence reading",
    "decode_influence": "Block influence writing",
}
ABLATED = ("prefill_kl", "decode_kl", "prefill_influence", "decode_influence")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for one
STYLE = """:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 16px; max-width: 1100px; font: 16px/1.5 system-ui, sans-serif; }
body { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { margin: 2rem 0 0.25rem; font-size: 1.15rem; } p { max-width: 46rem; }
.figure { overflow-x: auto; overflow-y: hidden; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 24px; } dd { margin: 0; } dt { opacity: 0.7; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }"""


def display_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """(names, rows) of text to show, in three significant figures; no cell is blank."""
    columns = _columns(result)
    return [NAMES[key] for key in columns], [list(map(_shown, row)) for row in zip(*columns.values(), strict=True)]


def csv_bytes(result: dict) -> bytes:
    """The table in full precision as a CSV file that spreadsheets open without taking text for formulas."""
    columns = _columns(result)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["model", "text", *columns])
    names = [neutral(result["model"]), neutral(result["text"])]
    for row in zip(*columns.values(), strict=True):
        writer.writerow([*names, *map(_written, row)])
    return text.getvalue().encode("utf-8-sig")


def report_html(result: dict, cutoff: int | None, tolerance: float, speedup: float | None, tokens: int) -> str:
    """A page of its own: sentences, figures and facts, with everything inside the file. Arguments as for the sentences
    of `findings`; cutoff also for the figures."""
    from plotly.offline import get_plotlyjs

    from .importance_plots import ablation_figure, curve_figure, layers_figure
    from .picture_plots import layered_figure
    from .token_plots import tokens_figure

    title = f"Importance of {result['model']}"
    parts = (
        (
            "Which layers matter to reading, and which to writing",
            " ".join(filter(None, (layers_sentence(result, cutoff), kinds_sentence(result, tolerance)))),
            layers_figure,
            (cutoff,),
        ),
        (
            "What a cutoff skips",
            curve_sentence(result, cutoff, tolerance, speedup, tokens),
            curve_figure,
            (tolerance, cutoff),
        ),
        ("Really leaving layers out", ablation_sentence(result), ablation_figure if result["ablation"] else None, ()),
        ("One sample, token by token", tokens_sentence(result), tokens_figure, ()),
        *_over_the_picture(result, layered_figure),
    )
    body = "".join(
        f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(sentence)}</p>\n"
        + ((make and f'<div class="figure">{_embedded(make(result, *options), f"figure-{at}")}</div>\n') or "")
        for at, (name, sentence, make, options) in enumerate(parts)
    )
    notes = [note for note in (uncertain(result), *result["notices"]) if note]
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in notes)
    known = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>\n" for name, value in facts(result))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{STYLE}
</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<h1>{html.escape(title)}</h1>
{notes}{body}<h2>What was analysed</h2>
<dl>
{known}</dl>
</body>
</html>
"""


def _over_the_picture(result: dict, make) -> list[tuple]:
    """The part of a report that is there with pictures only."""
    if not has_pictures(result):
        return []
    return [("The same over the picture", overlay_sentence(result, heaviest_layer(result)), make, ())]


def readable(result: dict, cutoff: int | None, tolerance: float, speedup: float | None, tokens: int) -> str:
    """The table and its sentences as text for a terminal. Arguments as for `report_html`."""
    names, rows = display_rows(result)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *rows)]
    sentences = (
        layers_sentence(result, cutoff),
        kinds_sentence(result, tolerance),
        curve_sentence(result, cutoff, tolerance, speedup, tokens),
        ablation_sentence(result),
        uncertain(result),
    )
    return "\n".join([caption(result), "", *lines, "", *filter(None, sentences)])


def neutral(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def _columns(result: dict) -> dict[str, list]:
    """The cells by column: a number, None where it is not finite, or `UNMEASURED`."""
    layers, ablation = result["layers"], result["ablation"]
    columns = {"layer": [entry["layer"] for entry in layers]}
    for stage in (*KINDS, *STAGES) if has_kinds(layers) else STAGES:
        for branch in BRANCHES:
            columns[f"{stage}_{branch}"] = [entry[f"{stage}_{branch}"] for entry in layers]
        columns[f"{stage}_se"] = [_if_known(entry[f"{stage}_se"], total(entry, stage)) for entry in layers]
    columns["ratio"] = [
        UNMEASURED if ratio is None and None not in (total(entry, stage) for stage in STAGES) else ratio
        for entry, ratio in zip(layers, ratios(layers), strict=True)
    ]
    shares = skipped_share(layers)
    whole = None if any(total(entry, "prefill") is None for entry in layers) else 0.0
    columns["skipped_share"] = shares[:-1] if shares else [_if_known(None, whole)] * len(layers)
    measured = {entry["cutoff"]: entry["kl"] for entry in result["cut_kl"]}
    columns["cut_kl"] = [measured.get(entry["layer"], UNMEASURED) for entry in layers]
    if ablation:
        columns |= {name: list(ablation[name]) for name in ABLATED}
    return columns


def _if_known(value: float | None, basis: float | None) -> float | str | None:
    """A value that is None for want of more samples, unless what it is based on is not finite itself."""
    return UNMEASURED if value is None and basis is not None else value


def _shown(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return "NaN" if value is None else value
    return "∞" if value == math.inf else f"{value:.3g}"


def _written(value: float | str | None):
    """A cell of the CSV: "NaN" for what is not finite, empty for what was not measured."""
    return {None: "NaN", UNMEASURED: ""}.get(value, value)


def _embedded(figure, name: str) -> str:
    """A figure as HTML, without the library."""
    config = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=config, div_id=name)
