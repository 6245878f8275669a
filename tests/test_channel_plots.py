"""Figures of a study: they draw what was measured, write out what was not, and invent no share."""

import copy
import json

import pytest
from studies import tiny_study
from tiny_files import tiny_folder

from pop_core import channel_view as view
from pop_core import recorded
from pop_core.channel_plots import MOST_ROWS, choices_figure, overlap_figure, regions_figure
from pop_core.expert_plots import experts_figure
from pop_core.method_plots import ordered, quality_figure, speed_figure
from pop_core.plan import ALL, CANDIDATES, NONE

RECORDED = recorded.load(recorded.RECORDED / "channels-smollm2.json")[0]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The folder of a model with one dense layer among mixtures with a shared expert."""
    return tiny_folder(tmp_path_factory.mktemp("mixture"), "qwen2-moe")


def all_figures(result: dict) -> list:
    single = view.single(result)
    layer = single[0] if single else 0
    figures = [regions_figure(result), choices_figure(result, layer), overlap_figure(result)]
    return [*figures, quality_figure(result), speed_figure(result), experts_figure(result)]


def sentence_of(figure) -> str:
    """The words of a figure that is only a sentence."""
    assert not figure.data
    return figure.layout.annotations[0].text.replace("<br>", " ")


@pytest.mark.parametrize("rescore", ["candidates", NONE, ALL])
def test_no_figure_hands_nan_to_plotly(llama, mixture, rescore):
    for folder in (llama, mixture):
        for figure in all_figures(tiny_study(folder, rescore=rescore)):
            json.loads(figure.to_json(), parse_constant=lambda word: pytest.fail(word))
            assert figure.layout.height


def test_the_bits_are_the_candidates_that_each_token_kept(llama):
    for result in (tiny_study(llama), RECORDED):
        for layer in view.layers(result):
            bits = view.kept_bits(layer)
            assert len(bits) == len(layer["kept"])
            assert all(len(row) == layer["candidates"] and sum(row) == layer["chosen"] for row in bits)


def test_overlaps_read_from_the_bits_are_those_that_were_measured(llama):
    for result in (tiny_study(llama), RECORDED):
        for layer in view.layers(result):
            steps = view.step_overlaps(layer)[1:]
            assert sum(steps) / len(steps) == pytest.approx(layer["overlap"])


def test_the_regions_of_a_layer_are_as_many_as_its_budget_says(llama):
    for layer in view.layers(tiny_study(llama)):
        letters = layer["regions"]
        assert [letters.count(letter) for letter in "rcp"] == [layer[n] for n in ("retained", "candidates", "pruned")]
        assert view.channels(layer) == len(letters)
        assert view.left_out(layer) == pytest.approx(1 - (layer["retained"] + layer["chosen"]) / len(letters))


def test_every_token_fills_exactly_what_it_chose():
    figure = choices_figure(RECORDED, 15)
    layer = view.layers(RECORDED)[15]
    grid = figure.data[0].z
    assert [sum(column) for column in zip(*grid, strict=True)] == [layer["chosen"]] * len(layer["kept"])
    counts = [sum(row) for row in grid]
    assert counts == sorted(counts, reverse=True)
    assert list(figure.layout.xaxis.ticktext) == list(figure.layout.xaxis2.ticktext)
    assert len(figure.layout.xaxis.ticktext) == len(layer["kept"])


def test_many_candidates_share_rows_and_none_is_lost():
    result = copy.deepcopy(RECORDED)
    layer = view.layers(result)[0]
    half = (1 << 480) - 1
    layer |= {"candidates": 960, "chosen": 480, "kept": [f"{half:x}", f"{half << 480:x}", f"{half << 100:x}"]}
    grid = choices_figure(result, 0).data[0].z
    assert len(grid) <= MOST_ROWS and 960 % len(grid) == 0
    for column in zip(*grid, strict=True):
        assert sum(column) * 960 / len(grid) == pytest.approx(480, abs=0.5)


def test_the_bands_edges_are_drawn_where_the_budget_has_them():
    figure, layer = regions_figure(RECORDED), view.layers(RECORDED)[0]
    rectangles = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    widths = [shape.x1 - shape.x0 for shape in rectangles]
    expected = [100 * layer[name] / 1536 for name in ("retained", "candidates", "pruned")]
    assert widths == pytest.approx(expected) and rectangles[-1].x1 == 100
    lines = {shape.x0 for shape in figure.layout.shapes if shape.type == "line"}
    assert sorted(lines) == pytest.approx([expected[0], expected[0] + expected[1]])
    text = " ".join(note.text for note in figure.layout.annotations)
    assert "retained 55%" in text and "candidates 10%" in text and "pruned 35%" in text


def test_without_candidates_no_band_is_drawn(llama):
    figure = regions_figure(tiny_study(llama, rescore=NONE))
    assert len([shape for shape in figure.layout.shapes if shape.type == "rect"]) == 2
    assert "candidates" not in " ".join(note.text for note in figure.layout.annotations)
    assert "fixed mask has no candidates" in sentence_of(choices_figure(tiny_study(llama, rescore=NONE), 0))


def test_one_token_has_chosen_nothing_and_the_figures_say_so(llama):
    result = tiny_study(llama, tokens=1)
    assert "single token" in sentence_of(choices_figure(result, 0))
    assert "no two tokens" in sentence_of(overlap_figure(result))
    assert regions_figure(result).data and quality_figure(result).data[0].x


def test_a_mixtures_layer_says_why_it_has_no_candidates(mixture):
    result = tiny_study(mixture)
    assert view.single(result) == [1]
    assert "mixture of experts" in sentence_of(choices_figure(result, 0))
    assert choices_figure(result, 1).data
    result["pruned"]["channels"]["layers"] = [view.layers(result)[at] for at in view.mixtures(result)]
    for figure in (regions_figure(result), choices_figure(result, 0)):
        assert "Every layer of this model is a mixture" in sentence_of(figure)


def test_experts_show_the_tokens_that_reached_them_and_which_stayed_whole(mixture):
    result = tiny_study(mixture, prompt="a")
    shown = [view.layers(result)[at] for at in view.mixtures(result)]
    whole = {(expert, row) for row, layer in enumerate(shown) for expert in layer["whole"]}
    heat, crosses, bars = experts_figure(result).data
    assert [list(row) for row in heat.z] == [layer["tokens"] for layer in shown]
    assert whole and set(zip(crosses.x, crosses.y, strict=True)) == whole
    assert all(heat.z[row][expert] == 0 for expert, row in whole)
    assert all(share < 0.4 for share, layer in zip(bars.x, shown, strict=True) if layer["whole"])
    assert list(bars.x) == [view.left_out(layer) for layer in shown]


def test_routing_is_counted_also_where_all_channels_are_scored_again(mixture):
    choosing, everything = (view.layers(tiny_study(mixture, rescore=kind)) for kind in (CANDIDATES, ALL))
    assert [layer.get("tokens") for layer in choosing] == [layer.get("tokens") for layer in everything]
    assert not any(layer.get("whole") for layer in everything)  # nothing was split, so nothing had to stay whole
    assert "no mixtures" in sentence_of(experts_figure(RECORDED))


def test_what_was_not_measured_has_no_bar_but_a_word():
    result = copy.deepcopy(RECORDED)
    for entry in result["methods"][2:4]:
        entry |= {"kl": None, "agreement": None, "step_ms": None, "step_spread": None, "partition_ms": None}
    for figure, (first, second) in ((quality_figure(result), (5, 5)), (speed_figure(result), (6, 6))):
        assert [len(trace.x) for trace in figure.data] == [first, second]
        labels = " ".join(figure.layout.yaxis.ticktext)
        assert labels.count("not measured") == 2 and None not in figure.data[0].x


def test_a_study_without_times_or_comparison_draws_no_empty_axes():
    result = copy.deepcopy(RECORDED)
    for entry in result["methods"]:
        entry |= {"step_ms": None, "step_spread": None}
    figure = speed_figure(result)
    assert [len(trace.x) for trace in figure.data] == [0, 8] and not figure.layout.xaxis.showticklabels
    for entry in result["methods"]:
        entry |= {"kl": None, "agreement": None, "partition_ms": None}
    assert "not timed" in sentence_of(speed_figure(result))
    assert "Stopped before" in sentence_of(quality_figure(result))


def test_both_figures_of_the_methods_have_the_same_order():
    names = [entry["title"] for entry in ordered(RECORDED)]
    assert names[:2] == ["Dense", "Candidates"] and sorted(names) == sorted(m["title"] for m in RECORDED["methods"])
    for figure in (quality_figure(RECORDED), speed_figure(RECORDED)):
        for axis in (figure.layout.yaxis, figure.layout.yaxis2):
            assert [label.split(" · ")[0] for label in axis.ticktext] == names


def test_one_slow_step_does_not_make_the_bars_tiny():
    result = copy.deepcopy(RECORDED)
    slowest = max(entry["step_ms"] for entry in result["methods"])
    assert speed_figure(result).layout.xaxis.range[1] > max(entry["step_spread"][1] for entry in result["methods"])
    result["methods"][3]["step_spread"][1] = 1e5
    assert slowest < speed_figure(result).layout.xaxis.range[1] < 3 * slowest


def test_chance_is_drawn_and_named():
    figure = overlap_figure(RECORDED)
    assert figure.layout.shapes[0].y0 == 0.5 and "by chance 50%" in figure.layout.annotations[0].text
    assert {trace.name for trace in figure.data} == {"candidates kept", "best half of all channels"}


def test_tokens_are_shown_as_text():
    result = copy.deepcopy(RECORDED)
    result["pruned"]["pieces"][0] = "<b>&\n"
    assert choices_figure(result, 0).layout.xaxis.ticktext[0] == "&lt;b&gt;&amp;⏎"
