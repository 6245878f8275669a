"""Figures of an analysis: everything has its place or its label, and any text stays text."""

import copy
import json
import math
import random
import subprocess
import sys

import pytest

from pop_core.importance_plots import (
    ablation_figure,
    curve_figure,
    layers_figure,
    layers_preview,
)
from pop_core.log_scale import DECADES
from pop_core.token_findings import visible
from pop_core.token_plots import tokens_figure

KEYS = ("prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn")


def made(layers: int = 6, tokens: int = 9, ablation: bool = True, seed: int = 0) -> dict:
    """A result with the expected asymmetry: reading falls with depth to exactly 0 in the last layer."""
    rng = random.Random(seed)
    entries = []
    for layer in range(layers):
        read = 0.0 if layer == layers - 1 else 10 * 0.5**layer
        wrote = 1.0 + rng.random()
        values = dict(zip(KEYS, (read, read / 2, wrote, wrote * 2), strict=True))
        entries.append({"layer": layer, **values, "prefill_se": read / 9, "decode_se": wrote / 9})
    names = ("prefill_kl", "decode_kl", "prefill_influence", "decode_influence")
    pairs = [f"{pair}_{stage}" for pair in ("gates_ablation", "influence_ablation") for stage in ("prefill", "decode")]
    ablated = {name: [0.01 * (layer + 1) for layer in range(layers)] for name in names}
    ablated |= {"samples": 2, "seconds": 3.0, "spearman": dict.fromkeys(pairs, 0.7)}
    return {
        "model": "tiny",
        "text": "a text",
        "samples": 12,
        "requested": 12,
        "prompt_tokens": 5,
        "new_tokens": 5,
        "seed": 0,
        "layers": entries,
        "recommended_cutoff": None,
        "tolerance": 0.05,
        "cut_kl": [{"cutoff": layer, "kl": 0.1 * (layers - 1 - layer)} for layer in range(max(1, layers // 2), layers)],
        "cut_samples": 2,
        "token_map": {
            "pieces": [f" t{i}" for i in range(tokens)],
            "first": 0,
            "boundary": tokens // 2,
            "attention": [[rng.random() for _ in range(tokens)] for _ in range(layers)],
            "ffn": [[rng.random() for _ in range(tokens)] for _ in range(layers)],
        },
        "ablation": ablated if ablation else None,
        "spearman_prefill": 0.9 if ablation else None,
        "spearman_decode": 0.6 if ablation else None,
        "loss": 2.5,
        "recompute": False,
        "seconds": 12.0,
        "forward_equivalents": 2.6,
        "device": "cpu",
        "dtype": "float32",
        "machine": "a CPU, 2 threads",
        "date": "2026-11-29T18:42:11+00:00",
        "versions": {},
        "complete": True,
        "stopped_in": None,
        "notices": [],
    }


def changed(result: dict, layer: int, value, keys=KEYS) -> dict:
    """The result with some values of a layer replaced."""
    result = copy.deepcopy(result)
    result["layers"][layer] |= dict.fromkeys(keys, value)
    return result


def every(result: dict, value) -> dict:
    """The result with the same value everywhere."""
    result = copy.deepcopy(result)
    for layer in range(len(result["layers"])):
        result = changed(result, layer, value)
    for branch in ("attention", "ffn"):
        result["token_map"][branch] = [[value] * len(row) for row in result["token_map"][branch]]
    if result["ablation"]:
        result["ablation"] |= {name: [value] * len(result["layers"]) for name in ("prefill_kl", "decode_kl")}
    return result


def all_figures(result: dict, cutoff: int | None, tolerance: float = 0.05) -> list:
    return [
        layers_figure(result, cutoff),
        curve_figure(result, tolerance, cutoff),
        ablation_figure(result),
        tokens_figure(result),
    ]


def written(figure, text: str) -> list[tuple]:
    """Where a figure has a text, as (x, y)."""
    return [(a.x, a.y) for a in figure.layout.annotations if a.text == text]


def wordy(figure) -> str:
    """All its annotations."""
    return " ".join(a.text for a in figure.layout.annotations).replace("<br>", " ")


CASES = {
    "usual": made(),
    "one": made(1),
    "two": made(2),
    "eighty": made(80, tokens=512),
    "no ablation": made(ablation=False),
    "all 0": every(made(), 0.0),
    "all unknown": every(made(), None),
    "all equal": every(made(), 1.0),
    "one unknown": changed(made(), 2, None, KEYS[1:2]),
    "too huge to add up": every(made(), 1.7e308),
    "huge": changed(made(), 1, 1e300),
    "tiny": every(made(), 1e-300),
    "empty map": made() | {"token_map": {"pieces": [], "first": 0, "boundary": 0, "attention": [[]], "ffn": [[]]}},
}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_valid_json_of_a_fixed_height(name):
    result = CASES[name]
    before = copy.deepcopy(result)
    for cutoff in (None, 1, len(result["layers"])):
        for tolerance in (0.0, 0.05, 1.0):
            for figure in all_figures(result, cutoff, tolerance):
                json.loads(figure.to_json(), parse_constant=pytest.fail)
                assert figure.layout.height and figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
                assert figure.layout.dragmode is False
    assert result == before


@pytest.mark.parametrize("name", CASES)
def test_a_cell_has_a_colour_or_a_label(name):
    figure = layers_figure(CASES[name], 1)
    heat = figure.data[0]
    labels = {(a.x, a.y): a.text for a in figure.layout.annotations if a.xref == "x" and a.yref == "y"}
    for row, key in enumerate(KEYS):
        for entry in CASES[name]["layers"]:
            value, at = entry[key], (entry["layer"], row)
            assert (heat.z[row][at[0]] is None) == (not value)
            assert labels.get(at) == ("NaN" if value is None else None if value else "0")
    assert heat.zmin < heat.zmax and math.isfinite(heat.zmin + heat.zmax)
    assert bool(heat.showscale) == any(z is not None for row in heat.z for z in row)


def test_one_scale_covers_all_four_rows_and_its_ticks_are_nats():
    heat = layers_figure(made(), None).data[0]
    assert heat.zmin == pytest.approx(min(z for row in heat.z for z in row if z is not None), abs=1e-3)
    assert heat.zmax == pytest.approx(max(z for row in heat.z for z in row if z is not None), abs=1e-3)
    assert [float(text) for text in heat.colorbar.ticktext] == pytest.approx([10**v for v in heat.colorbar.tickvals])
    wide = layers_figure(changed(made(), 0, 1e-200), None).data[0]
    assert wide.zmax - wide.zmin == pytest.approx(DECADES)


def test_hover_says_value_and_standard_error():
    hover = layers_figure(made(), None).data[0].customdata[0][1]
    assert all(part in hover for part in ("layer 1", "Reading · attention", "5", "standard error"))
    assert (
        "standard error" not in layers_figure(changed(made(), 1, None, ("prefill_se",)), None).data[0].customdata[0][1]
    )


def test_ratios_that_are_no_numbers_are_written():
    result = changed(made(), 1, 0.0, KEYS[:2])
    result = changed(changed(changed(result, 2, 0.0, KEYS[2:]), 3, 0.0), 4, None)
    figure = layers_figure(result, None)
    line = next(t for t in figure.data[1:] if t.mode == "lines+markers")
    assert [value is None for value in line.y] == [False, True, True, True, True, True]
    assert [x for x, _ in written(figure, "∞")] == [1, 5]
    assert [x for x, _ in written(figure, "n/a")] == [3, 4]
    assert 2 in [x for x, y in written(figure, "0") if not isinstance(y, int)]
    assert {t.marker.symbol: t.x for t in figure.data[1:] if t.mode == "markers"} == {
        "triangle-up": (1, 5),
        "triangle-down": (2,),
    }


def test_the_cutoff_stands_between_two_layers():
    figure = layers_figure(made(), 4)
    line = next(s for s in figure.layout.shapes if s.yref == "paper")
    assert (line.x0, line.x1, line.y0, line.y1) == (3.5, 3.5, 0, 1) and written(figure, "cutoff 4")
    bare = layers_figure(made(), None)
    assert not any(s.yref == "paper" for s in bare.layout.shapes) and "cutoff" not in wordy(bare)


def test_the_curve_keeps_zeros_and_small_shares_in_sight():
    result = changed(made(), 4, 1e-9, KEYS[:2])
    figure = curve_figure(result, 0.05, 2)
    curve = figure.data[0]
    assert curve.y[0] == pytest.approx(100) and list(curve.y[5:]) == [None, None]
    assert [x for x, _ in written(figure, "0")] == [5, 6]
    assert curve.y[4] == pytest.approx(0.1) and curve.marker.symbol[4] == "triangle-down"
    assert curve.customdata[4] == "under 0.1%"
    assert "tolerance 5%" in wordy(figure) and "cutoff 2" in wordy(figure)


@pytest.mark.parametrize(("name", "why"), [("all 0", "exactly 0"), ("all unknown", "not a finite number")])
def test_no_curve_says_why(name, why):
    figure = curve_figure(CASES[name], 0.05, 2)
    assert not figure.data and why in wordy(figure)


def test_ablation_labels_what_has_no_bar():
    result = made()
    result["ablation"]["prefill_kl"][5], result["ablation"]["decode_kl"][2] = 0.0, None
    figure = ablation_figure(result)
    assert [[y is None for y in bar.y].index(True) for bar in figure.data] == [5, 2]
    assert [x for x, _ in written(figure, "0")] == [5] and [x for x, _ in written(figure, "NaN")] == [2]
    assert figure.layout.yaxis.range == figure.layout.yaxis2.range  # or the bars could not be compared
    assert "Not measured" in wordy(ablation_figure(made(ablation=False)))


def test_tokens_are_shown_literally():
    pieces = ["<b>x</b>", "<img src=x>", "\n", "", "\t", " word", "&lt;", "<script>alert(1)</script>", "🙂"]
    result = made(tokens=len(pieces))
    result["token_map"]["pieces"] = pieces
    shown = tokens_figure(result).layout.xaxis.ticktext
    assert shown[0] == "&lt;b&gt;x&lt;/b&gt;" and shown[1] == "&lt;img·src=x&gt;"
    assert shown[2:7] == ("⏎", "∅", "⇥", "·word", "&amp;lt;")
    assert shown[8] == "🙂" and not any("<" in text for text in shown)


def test_labels_of_tokens_are_short_and_never_blank():
    for piece in ("", " ", "\n\n", "\u202egnp", "\x00", "\u200b", "a" * 500, "\ud800"):
        label = visible(piece)
        assert 0 < len(label) <= 12 and label.strip() == label and label.isprintable()
        label.encode()


def test_the_map_is_as_wide_as_its_tokens_and_marks_where_writing_begins():
    for tokens in (2, 40, 512):
        figure = tokens_figure(made(tokens=tokens))
        assert figure.layout.width >= max(600, 15 * tokens) and figure.layout.autosize is False
        assert len(figure.layout.xaxis.ticktext) == len(figure.data[0].z[0]) == tokens
        assert figure.layout.shapes[0].x0 == tokens // 2 - 0.5
        assert written(figure, "reads") and written(figure, "writes")
    result = made()
    result["token_map"] |= {"first": 100, "boundary": 0}
    figure = tokens_figure(result)
    assert not figure.layout.shapes and not written(figure, "reads") and figure.data[0].x[0] == 100


def test_cells_of_the_map_without_a_colour_say_so_and_the_json_is_small():
    result = made(30, tokens=512)
    result["token_map"]["attention"][0][:3] = None, 0.0, 1 / 3
    result["token_map"]["ffn"][0][1:3] = 0.0, 0.0
    figure = tokens_figure(result)
    assert list(figure.data[0].z[0][:2]) == [None, None]
    assert list(figure.data[0].customdata[0][:3]) == ["NaN", "0", 0.333]
    assert len(figure.to_json()) < 400_000


def test_torch_and_pandas_are_not_imported():
    modules = ("findings", "importance_plots", "importance_table", "token_plots", "picture_plots", "picture_findings")
    program = f"import sys; from pop_core import {', '.join(modules)}; print({{'torch', 'pandas'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("result", CASES.values(), ids=CASES)
def test_the_preview_has_a_cell_for_every_value_and_a_word_where_there_is_no_colour(result):
    preview = layers_preview(result)
    uncoloured = sum(not value for entry in result["layers"] for key, value in entry.items() if key in KEYS)
    assert preview.count("<i") == 4 * len(result["layers"])
    assert preview.count("<i>0</i>") + preview.count("<i>NaN</i>") == uncoloured
