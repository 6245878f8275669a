"""Results with pictures as figures, words and tables; and results of before, which have none."""

import copy
import csv
import io
import json

import pytest
from test_importance_plots import changed, made, wordy, written

from pop_core import importance
from pop_core.findings import caption, curve_sentence, facts
from pop_core.importance_plots import layers_figure, layers_preview
from pop_core.importance_table import csv_bytes, display_rows, readable, report_html
from pop_core.picture_findings import kinds_sentence, overlay_sentence, place_words
from pop_core.picture_plots import MOST_SHOWN, layered_figure, overlay_figure
from pop_core.picture_view import has_pictures, heaviest_layer, layer_sums
from pop_core.token_findings import labels, tokens_sentence
from pop_core.token_plots import MOST_TOKENS, tokens_figure

ROWS, COLUMNS, START = 3, 4, 2
THUMBNAIL = "data:image/jpeg;base64,AAAA"
KINDS = [f"{kind}_{branch}" for kind in importance.KINDS for branch in importance.BRANCHES]


def seen(layers: int = 6, pictures: int = 1) -> dict:
    """A result with pictures of 3 x 4 tokens. In layer 1 the top right of the last one matters most, in layer 2 the
    bottom left; layer 1 is the heaviest."""
    result = made(layers, tokens=START + pictures * ROWS * COLUMNS + 6)
    for entry in result["layers"]:
        for kind, factor in (("image", 0.5 ** entry["layer"]), ("text", 0.8 ** entry["layer"])):
            value = 0.0 if entry["layer"] == layers - 1 else factor
            entry |= {f"{kind}_attention": value, f"{kind}_ffn": value, f"{kind}_se": value / 9}
    shown = result["token_map"]
    places = [{"start": START + at * ROWS * COLUMNS, "rows": ROWS, "columns": COLUMNS} for at in range(pictures)]
    shown |= {"pictures": places, "boundary": START + pictures * ROWS * COLUMNS + 3}
    for layer in range(layers):
        for branch in importance.BRANCHES:
            value = 0.0 if layer == layers - 1 else 1e-3
            shown[branch][layer] = [value] * len(shown["pieces"])
    last = places[-1]["start"]
    shown["attention"][1][last + COLUMNS - 1] = 8.0
    shown["ffn"][2][last + (ROWS - 1) * COLUMNS] = 2.0
    fact = {"width": 400, "height": 300, "seen_width": 400, "seen_height": 300, "tokens": ROWS * COLUMNS}
    result["pictures"] = [fact | {"rows": ROWS, "columns": COLUMNS, "thumbnail": THUMBNAIL}] * pictures
    return result | {"image_tokens": 12.0 * pictures, "lowest_cutoff": 3, "cutoffs_by_kind": {"image": 4, "text": 5}}


def test_the_map_lies_over_its_picture_the_right_way_up():
    figure = overlay_figure(seen(), 1)
    (drawn,) = figure.data
    assert max((z, row, column) for row, line in enumerate(drawn.z) for column, z in enumerate(line))[1:] == (0, 3)
    assert (len(drawn.z), len(drawn.z[0])) == (ROWS, COLUMNS)
    assert (drawn.x0, drawn.dx, drawn.y0, drawn.dy) == (0.5, 1, 0.5, 1)  # cell (r, c) covers x c..c+1 and y r..r+1
    assert tuple(figure.layout.yaxis.range) == (ROWS, 0) and tuple(figure.layout.xaxis.range) == (0, COLUMNS)
    (image,) = figure.layout.images
    assert (image.source, image.layer, image.sizing) == (THUMBNAIL, "below", "stretch")
    assert (image.x, image.y, image.sizex, image.sizey) == (0, 0, COLUMNS, ROWS)
    assert (image.xref, image.yref) == ("x", "y") or (image.xref, image.yref) == ("x1", "y1")
    assert figure.layout.yaxis.scaleratio == pytest.approx((300 / ROWS) / (400 / COLUMNS))
    assert 0 < drawn.opacity < 1
    assert drawn.customdata[0][3] == "row 1, column 4<br>8 nats" and "row 3, column 1" in drawn.customdata[2][0]
    lower = overlay_figure(seen(), 2).data[0]
    assert max((z, row, column) for row, line in enumerate(lower.z) for column, z in enumerate(line))[1:] == (2, 0)


def test_colours_mean_the_same_in_every_layer():
    scales = {(t.zmin, t.zmax, str(t.colorscale)) for layer in range(6) for t in overlay_figure(seen(), layer).data}
    assert len(scales) == 1
    assert all(z is None for line in overlay_figure(seen(), 5).data[0].z for z in line)  # exact zeros have no colour


@pytest.mark.parametrize("pictures", [1, 2, 3, MOST_SHOWN + 1])
def test_every_picture_has_its_own_map(pictures):
    result, shown = seen(pictures=pictures), min(pictures, MOST_SHOWN)
    figure = overlay_figure(result, 1)
    assert len(figure.data) == len(figure.layout.images) == shown
    assert len({trace.yaxis for trace in figure.data}) == shown
    assert [bool(written(figure, f"Picture {number}")) for number in range(1, shown + 1)] == [pictures > 1] * shown
    if pictures <= MOST_SHOWN:
        assert ["<br>8 nats" in t.customdata[0][3] for t in figure.data] == [False] * (shown - 1) + [True]
    json.loads(figure.to_json(), parse_constant=pytest.fail)


def test_a_file_has_every_layer_and_a_slider():
    figure = layered_figure(seen(pictures=2))
    (slider,) = figure.layout.sliders
    assert len(figure.data) == 2 * 6 and [step.label for step in slider.steps] == [str(layer) for layer in range(6)]
    assert [trace.visible for trace in figure.data] == [True] * 2 + [False] * 10
    assert slider.steps[3].args[1] == (False,) * 6 + (True,) * 2 + (False,) * 4


@pytest.mark.parametrize("value", [None, 0.0, 1e300])
def test_any_map_can_be_laid_over(value):
    result = seen()
    for branch in importance.BRANCHES:
        result["token_map"][branch][1] = [value] * len(result["token_map"]["pieces"])
    for layer in range(6):
        json.loads(overlay_figure(result, layer).to_json(), parse_constant=pytest.fail)
        said = overlay_sentence(result, layer)
        assert said.endswith(".") and not any(word in said.split() for word in ("None", "nan", "inf"))
    assert heaviest_layer(result) in range(6)


def test_the_overlay_in_words():
    result = seen()
    said = overlay_sentence(result, 1)
    assert "In layer 1 the part of the picture that matters most is at the top right (row 1, column 4)" in said
    assert "No layer matters more to the image tokens" in said and heaviest_layer(result) == 1
    below = overlay_sentence(result, 2)
    assert "at the bottom left (row 3, column 1)" in below and "number 2 of 6; layer 1 carries most" in below
    assert "an even share would be 8.3%" in below
    assert "exactly 0" in overlay_sentence(result, 5) and "Later tokens see only the keys" in overlay_sentence(
        result, 5
    )
    assert "of picture 2 that" in overlay_sentence(seen(pictures=2), 1)
    assert layer_sums(result)[0] == pytest.approx(24e-3)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ((0, 0, 6, 6), "at the top left"),
        ((2, 3, 6, 6), "in the middle"),
        ((5, 2, 6, 6), "at the bottom"),
        ((3, 5, 6, 6), "at the right"),
        ((0, 1, 1, 2), "at the right"),
        ((1, 0, 2, 1), "at the bottom"),
        ((0, 0, 1, 1), "in the middle"),
        ((0, 7, 1, 24), "at the left"),
    ],
)
def test_places_are_said_as_people_do(cell, words):
    assert place_words(*cell) == words


def test_the_kinds_in_words_follow_the_tolerance():
    result = seen()
    said = kinds_sentence(result, 0.05)
    for kind in importance.KINDS:
        assert (
            f"{kind} tokens need the first {importance.recommend(result['layers'], 0.05, kind)} layers" in said.lower()
        )
    assert said.endswith("within the tolerance of 5%.")
    assert kinds_sentence(result, 0.4) != said and "only the first layer" in kinds_sentence(result, 1.0)
    assert kinds_sentence(made(), 0.05) == ""
    unknown = kinds_sentence(changed(result, 2, None, ("image_ffn",)), 0.05)
    assert "The layers that image tokens need are not known: a value is not a finite number." in unknown
    assert unknown.startswith("Text tokens need")


def test_the_heatmap_has_rows_for_both_kinds():
    result = seen()
    figure = layers_figure(result, 3)
    heat = figure.data[0]
    assert figure.layout.yaxis.ticktext == (
        *("Images · attention", "Images · FFN", "Text · attention", "Text · FFN"),
        *("Reading · attention", "Reading · FFN", "Writing · attention", "Writing · FFN"),
    )
    assert len(heat.z) == 8 and figure.layout.height > layers_figure(made(), 3).layout.height
    labels = [(a.x, a.y) for a in figure.layout.annotations if a.text == "0" and a.xref == "x" and a.yref == "y"]
    assert {(5, row) for row in range(6)} <= set(labels)
    assert layers_preview(result).count("<i") == 8 * 6
    bottom = figure.layout.yaxis.domain[0]  # of the heatmap; the label of the cutoff is beneath it
    (place,) = written(figure, "cutoff 3")
    assert figure.layout.yaxis2.domain[1] < place[1] < bottom


def test_tables_and_files_have_both_kinds():
    result = seen()
    names, rows = display_rows(result)
    assert names[1:7] == ["Images attention", "Images FFN", "Images s.e.", "Text attention", "Text FFN", "Text s.e."]
    assert len(rows[0]) == len(names)
    table = list(csv.DictReader(io.StringIO(csv_bytes(result).decode("utf-8-sig"))))
    for key in KINDS:
        assert [float(row[key]) for row in table] == [entry[key] for entry in result["layers"]]
    page = report_html(result, 3, 0.05, 1.4, 512)
    assert page.count('class="figure"') == 5 and "The same over the picture" in page and "Image tokens need" in page
    assert "Image tokens need" in readable(result, 3, 0.05, 1.4, 512)


def test_words_about_a_result_know_its_pictures():
    result = seen()
    assert "12 of them of pictures" in caption(result) and "about 5 + 5 tokens" in caption(result)
    assert dict(facts(result))["Mean length"] == "5 prompt tokens, 5 written; of the prompt 12 image tokens"
    bound = curve_sentence(result, 3, 0.9, 1.4, 512)
    assert bound.startswith("Cutoff 3 is the lowest that a prompt with pictures can have (DeepStack), and it skips")
    assert importance.recommended(result, 0.9) == 3 and importance.recommended(made(), 0.9) == 1
    free = curve_sentence(made(), 1, 0.9, 1.4, 512)
    assert free.startswith("Cutoff 1 is the lowest that skips at most 90%")


def test_image_tokens_of_the_map_are_named_by_their_place():
    result = seen(pictures=2)
    names = labels(result["token_map"])
    assert names[START : START + 5] == ["▦ 1,1", "▦ 1,2", "▦ 1,3", "▦ 1,4", "▦ 2,1"]
    assert names[0] == "·t0" and names[START + 2 * ROWS * COLUMNS] == "·t26"
    assert "the image token in row 1, column 4 of picture 2, number 18, weighs most" in tokens_sentence(result)
    assert tokens_figure(result).layout.xaxis.ticktext[START] == "▦ 1,1"


def test_a_long_map_is_drawn_to_its_end():
    result = made(tokens=MOST_TOKENS + 100)
    result["token_map"]["boundary"] = MOST_TOKENS + 90
    figure = tokens_figure(result)
    assert len(figure.data[0].z[0]) == MOST_TOKENS and figure.data[0].x[0] == 100
    assert figure.layout.xaxis.ticktext[-1] == f"·t{MOST_TOKENS + 99}"
    assert figure.layout.shapes[0].x0 == MOST_TOKENS + 90 - 0.5


def test_results_of_before_have_no_pictures():
    result, before = made(), copy.deepcopy(made())
    assert not has_pictures(result) and overlay_sentence(result, 0) == ""
    assert "no pictures" in wordy(overlay_figure(result, 0))
    assert importance.cutoffs_by_kind(result["layers"], 0.05) is None
    assert report_html(result, 3, 0.05, 1.4, 512).count('class="figure"') == 4
    assert result == before
