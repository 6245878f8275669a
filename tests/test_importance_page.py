"""The Importance page without a browser: handlers on a tiny model, what is shown, what is written to files."""

import html
import json
import math
import threading
from pathlib import Path

import pytest
from page_runs import collect
from tiny_vision import scribble, seeing_folder

from pages import analysing, analysis_settings, importance, links, shared
from pop_core import calibration
from pop_core.errors import PopError

pytestmark = pytest.mark.usefixtures("no_toasts")
WORDS = "the cat and the dog walk in a wood and see what is this thing there " * 60


@pytest.fixture
def raw(tiny):
    """Settings as the page sends them."""
    return dict(
        model=tiny, source="own", own=WORDS, file=None, images=None, question="", samples=3, prompt_tokens=10,
        new_tokens=4, ablated=1, seed=0, tolerance=5,
    )  # fmt: skip


def run(raw, stop=None, previous=None) -> dict:
    return collect(analysing.run(raw, previous or {}, stop or threading.Event(), "s"))


def test_an_analysis_shows_its_figures_words_and_files(raw):
    shown = run(raw)
    assert "Done" in shown["status"] and shown["alert"] == "" and shown["result"]["complete"]
    assert set(importance.OUTPUTS) <= set(shown)
    saved = json.loads(Path(shown["json"]).read_text(encoding="utf-8"))
    assert saved["layers"] == shown["result"]["layers"] and saved["ablation"]["samples"] == 1
    assert Path(shown["csv"]).read_bytes().startswith(b"\xef\xbb\xbfmodel,text,layer")
    assert len(shown["table"]["data"]) == 6 and f"cutoff={saved['recommended_cutoff']}" in shown["choice"]


def test_the_same_settings_give_the_same_numbers(raw):
    assert run(raw)["result"]["layers"] == run(raw)["result"]["layers"]
    assert run(raw)["result"]["layers"] != run(raw | {"seed": 1})["result"]["layers"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"own": "  \n"}, "The text is empty"),
        ({"own": None}, "The text is empty"),
        ({"own": "too short"}, "tokens; 3 overlapping pieces of"),
        ({"own": "x" * 200_001}, "at most 200,000"),
        ({"source": "file"}, "No file was chosen"),
        ({"source": "<b>"}, "it must be one of"),
        ({"samples": 0}, "between 1 and 500"),
        ({"samples": None}, "must be a whole number"),
        ({"samples": math.nan}, "must be a whole number"),
        ({"samples": 1e9}, "between 1 and 500"),
        ({"prompt_tokens": 1}, "between 2 and"),
        ({"prompt_tokens": 2000}, "fit this model's context"),
        ({"new_tokens": 0}, "between 1 and"),
        ({"new_tokens": "abc"}, "must be a whole number"),
        ({"ablated": 4}, "between 0 and 3"),
        ({"seed": -1}, "between 0 and"),
        ({"tolerance": 200}, "from 0 to 100 percent"),
        ({"tolerance": None}, "from 0 to 100 percent"),
        ({"tolerance": math.nan}, "from 0 to 100 percent"),
        ({"model": "no such model"}, "no local folder"),
        ({"model": None}, "No model is named"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_lost(raw, capsys, change, sentence):
    shown = run(raw | change)
    assert sentence in html.unescape(shown["alert"]) and sentence in capsys.readouterr().err
    assert not {"layers", "result", "tokens"} & set(shown)


def test_a_file_is_read_as_text(raw, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\ufeff" + WORDS, encoding="utf-8")
    assert run(raw | {"source": "file", "file": str(path)})["result"]["layers"] == run(raw)["result"]["layers"]
    path.write_bytes(b"\xff\xfe\x00bad")
    assert "not UTF-8 text" in run(raw | {"source": "file", "file": str(path)})["alert"]


def test_every_calibration_text_can_be_chosen():
    for source in analysis_settings.TEXTS:
        assert analysis_settings.read_text(source, None, None)
    assert analysis_settings.read_text("all", "", None) == calibration.read_all()


def test_stopping_keeps_the_samples_that_are_done(raw):
    stop = threading.Event()
    shown = {}
    for update in analysing.run(raw | {"samples": 200, "ablated": 0}, {}, stop, "s"):
        shown |= update
        if " of 200 samples" in update.get("status", "") and ": 0 of" not in update["status"]:
            stop.set()
    assert "Stopped: the result is that of" in shown["status"]
    assert 0 < shown["result"]["samples"] < 200 and not shown["result"]["complete"]
    assert run(raw)["result"]["complete"]  # the model is free


def test_stopped_before_the_first_sample_nothing_changes(raw):
    stop = threading.Event()
    stop.set()
    shown = run(raw, stop)
    assert "Stopped before" in shown["status"] and not {"layers", "result"} & set(shown)


def test_a_failure_half_way_brings_the_figures_of_before_back(raw, monkeypatch):
    previous = run(raw)["result"]
    from pop_core import analysis

    real, calls = analysis.gate_gradients, []

    def broken(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("secret detail")
        return real(*arguments)

    monkeypatch.setattr(analysis, "gate_gradients", broken)
    monkeypatch.setattr(analysing, "so_far", lambda *_: {"layers": "a figure of the run that fails"})
    shown = run(raw, previous=previous)
    assert shown["result"] == previous and shown["layers"] != "a figure of the run that fails"
    assert "secret" not in shown["alert"] and shown["alert"]


def test_the_tolerance_moves_the_cutoff_and_everything_that_shows_it(raw):
    result = run(raw)["result"]
    tight, loose = analysing.chosen(result, 0), analysing.chosen(result, 100)
    assert "cutoff=5" in tight["choice"] and "cutoff=1" in loose["choice"]
    assert tight["curve_note"] != loose["curve_note"] and tight["layers"] != loose["layers"]
    with pytest.raises(PopError, match="from 0 to 100 percent"):
        analysing.chosen(result, "x")


def test_the_link_sets_the_model_and_the_cutoff_of_the_first_page(raw):
    result = run(raw)["result"] | {"model": 'a/b"><script>'}
    link = analysing.choice(result, 4)
    assert "<script>" not in link
    query = dict(part.split("=") for part in html.unescape(link).split('href="./?')[1].split('"')[0].split("&"))
    assert query["cutoff"] == "4" and set(query) == {"model", "cutoff"}
    assert "No cutoff" in analysing.choice(result, None)
    assert links.read_model({"model": "owner/name"}) == ("owner/name", "")


def test_recorded_results_are_shown_without_loading_a_model():
    for name in shared.IMPORTANCE:
        shown = importance.picked(name, 5)
        assert "Recorded with" in shown["status"] and f"model={name}" in shown["choice"]
    assert "no recorded result" in importance.picked("owner/name", 5)["status"]


def test_what_an_analysis_needs_is_said_before():
    ahead = importance.looked_ahead("smollm2", 16, 128, 32, 0)
    assert "16 samples of 160 tokens" in ahead and "GB of memory" in ahead
    assert "must be between 1 and 500" in importance.looked_ahead("smollm2", 0, 128, 32, 0)
    assert "once the model is loaded" in importance.looked_ahead("owner/name", 16, 128, 32, 0)


def test_the_report_is_one_file_that_needs_no_network(raw):
    text = Path(analysing.report_file(run(raw)["result"], 5, "s")).read_text(encoding="utf-8")
    assert "Plotly.newPlot" in text and "<script src" not in text


def test_a_new_tolerance_takes_the_report_of_the_old_one_away(raw):
    assert analysing.chosen(run(raw)["result"], 20)["report"]["visible"] is False


def test_the_line_above_the_figures_says_whose_they_are(raw):
    shown = run(raw)
    assert Path(raw["model"]).name in shown["caption"] and "3 samples of 10 + 4 tokens" in shown["caption"]
    assert "smollm2: 200 samples" in importance.picked("smollm2", 5)["caption"]


def test_a_lossless_cutoff_costs_nothing(raw):
    result = run(raw)["result"]
    assert "no KL beyond rounding errors" in analysing.chosen(result, 0)["curve_note"]


def test_the_heatmap_is_drawn_again_only_when_the_samples_have_doubled(raw, monkeypatch):
    def every_post(work, stop):
        posted = []
        work(posted.append, lambda: None)
        yield from posted

    monkeypatch.setattr(analysing, "watch", every_post)
    updates = list(analysing.run(raw | {"samples": 20, "ablated": 0}, {}, threading.Event(), "s"))
    assert sum("status" in update for update in updates) > 20
    assert sum("layers" in update for update in updates) == 6  # after 1, 2, 4, 8 and 16 samples, and at the end


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> str:
    """The folder of a tiny model with eyes, as a visitor types it."""
    return str(seeing_folder(tmp_path_factory.mktemp("seeing"), "qwen3-vl"))


@pytest.fixture
def upload(tmp_path) -> str:
    scribble(24, 16).save(tmp_path / "my picture.png")
    return str(tmp_path / "my picture.png")


def of_picture(raw, seeing, upload) -> dict:
    return raw | {"model": seeing, "source": "picture", "images": [upload], "question": "what is this <b>"}


def test_my_own_picture_is_shown_with_its_map(raw, seeing, upload):
    shown = run(of_picture(raw, seeing, upload))
    assert shown["alert"] == "" and set(importance.OUTPUTS) <= set(shown)
    result = shown["result"]
    assert result["samples"] == 3 and result["text"] == "My own picture: what is this <b>"
    assert result["layers"][0]["image_se"] > 0  # other labels in every sample
    assert shown["over"]["visible"] and result["pictures"][0]["thumbnail"] in shown["pictures"]
    assert f"{result['pictures'][0]['tokens']} tokens" in shown["pictures"] and "24 × 16" in shown["pictures"]
    assert shown["layer"]["maximum"] == 5 and "Image tokens need" in shown["layers_note"]
    heaviest, last = analysing.in_layer(result, shown["layer"]["value"]), analysing.in_layer(result, 5)
    assert heaviest["overlay"] == shown["overlay"] and "exactly 0" in last["overlay_note"]
    for layer in (6, -1, None, "x", 1.5):
        with pytest.raises(PopError, match="layer"):
            analysing.in_layer(result, layer)
    assert "image tokens" in shown["facts"] and "<b>" not in shown["facts"]


def test_generated_pictures_can_be_analysed(raw, seeing):
    shown = run(raw | {"model": seeing, "source": "scenes", "prompt_tokens": 10, "new_tokens": 8})
    assert shown["alert"] == "" and shown["result"]["text"] == "Generated pictures with questions"
    assert shown["result"]["image_tokens"] > 0 and "cutoff=" in shown["choice"]
    assert Path(analysing.report_file(shown["result"], 5, "s")).read_text(encoding="utf-8").count("data:image") >= 1


def test_a_result_of_text_hides_the_pictures_of_the_one_before(raw):
    shown = run(raw)
    assert shown["over"]["visible"] is False and shown["pictures"] == "" and shown["overlay"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": None}, "There is no picture"),
        ({"images": []}, "There is no picture"),
        ({"images": ["/no/such/file.png"]}, "no longer on the server"),
        ({"question": " "}, "The prompt is empty"),
        ({"question": None}, "The prompt is empty"),
        ({"new_tokens": 5000}, "between 1 and"),
    ],
)
def test_a_picture_that_cannot_be_asked_about_is_one_sentence(raw, seeing, upload, change, sentence):
    shown = run(of_picture(raw, seeing, upload) | change)
    assert sentence in html.unescape(shown["alert"]) and "result" not in shown


@pytest.mark.parametrize("source", ["picture", "scenes"])
def test_a_model_without_eyes_says_so(raw, upload, source):
    shown = run(raw | {"source": source, "images": [upload], "question": "what"})
    assert "reads text only and cannot see a picture" in html.unescape(shown["alert"]) and "result" not in shown
    assert "cannot see a picture" in importance.looked_ahead("smollm2", 16, 128, 32, 0, source)


def test_the_source_fits_the_model_that_is_picked():
    assert importance.fitting_source("shapes-vl", "all") == "scenes"
    assert importance.fitting_source("shapes-vl", "picture") == "picture"
    assert importance.fitting_source("smollm2", "scenes") == "all"
    assert importance.fitting_source("smollm2", "own") == "own"
    assert importance.fitting_source("owner/name", "picture") == "picture"  # nobody knows yet
    for source in analysis_settings.CHOICES:
        updates = zip(importance.SOURCE_PARTS, importance.source_parts(source), strict=True)
        visible = {name: update["visible"] for name, update in updates}
        assert visible["question"] == visible["picture_box"] == (source == "picture")
        assert visible["prompt_tokens"] == (source not in ("picture", "scenes"))
    assert "depends on its picture" in importance.looked_ahead("shapes-vl", 16, 128, 32, 0, "scenes")


def test_an_embedded_model_without_a_recorded_result_opens_too(monkeypatch):
    monkeypatch.delitem(shared.IMPORTANCE, "shapes-vl", raising=False)
    assert "no recorded result" in importance.picked("shapes-vl", 5)["status"]
