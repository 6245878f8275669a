"""The Channels page without a browser: handlers on a tiny model, what is shown, what is written to files."""

import csv
import html
import io
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from page_runs import collect
from tiny_files import tiny_folder

from pages import channels, choosing, links
from pages.choosing_html import link_here, link_to_compare, pieces
from pop_core import channel_table as table
from pop_core import channel_view as view
from pop_core.errors import Cancelled, PopError
from pop_core.plan import PrefillCut

pytestmark = pytest.mark.usefixtures("no_toasts")
RESULT = choosing.RECORDED["smollm2"][0]


@pytest.fixture
def raw(tiny):
    """Settings as the page sends them."""
    return dict(
        model=tiny, prompt="what is this thing", ratio=0.4, width=0.4, rescore="candidates", score="sum",
        max_new_tokens=6, peers=True, layer=2,
    )  # fmt: skip


def run(raw, stop=None, previous=None, session="s") -> dict:
    return collect(choosing.run(raw, previous or {}, stop or threading.Event(), session))


def test_a_study_shows_its_figures_words_and_files(raw):
    shown = run(raw)
    assert "Done" in shown["status"] and shown["alert"] == "" and shown["result"]["complete"]
    assert set(channels.OUTPUTS) <= set(shown)
    figures = [name.removesuffix("_note") for name in channels.OUTPUTS if name.endswith("_note")]
    assert len(figures) == 7 and all(shown[f"{name}_note"] for name in figures if name != "experts")
    assert json.loads(Path(shown["json"]).read_text(encoding="utf-8")) == shown["result"]
    assert len(shown["method_table"]["data"]) == len(shown["result"]["methods"]) == 8
    assert len(shown["layer_table"]["data"]) == 6 and shown["layer"]["value"] == 2
    assert not shown["mixture"]["visible"]


def test_a_mixture_of_experts_shows_its_experts(raw, tmp_path):
    shown = run(raw | {"model": str(tiny_folder(tmp_path, "qwen3-moe")), "layer": 1})
    assert "Done" in shown["status"] and shown["mixture"]["visible"] and "experts" in shown["experts_note"]
    assert not shown["choices"].data and not shown["choices_note"]  # the figure is the sentence
    assert shown["experts"].data and shown["single"]["visible"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": "  \n"}, "The prompt is empty"),
        ({"prompt": None}, "The prompt is empty"),
        ({"prompt": "x" * 200_001}, "at most 200,000"),
        ({"ratio": 0}, "nothing is pruned"),
        ({"ratio": None}, "must be a number from 0 to 1"),
        ({"ratio": math.nan}, "must be a number from 0 to 1"),
        ({"ratio": 1.1}, "must be a number from 0 to 1"),
        ({"width": 0.9}, "half of the band lies on either side"),
        ({"width": math.inf}, "must be a number from 0 to 1"),
        ({"width": "<b>"}, "must be a number from 0 to 1"),
        ({"rescore": "some"}, "must be one of candidates"),
        ({"score": None}, "must be one of sum"),
        ({"max_new_tokens": 0}, "between 1 and 256"),
        ({"max_new_tokens": 257}, "between 1 and 256"),
        ({"max_new_tokens": math.nan}, "must be a whole number"),
        ({"model": "no such model"}, "no local folder"),
        ({"model": None}, "No model is named"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_lost(raw, capsys, change, sentence):
    shown = run(raw | change)
    assert sentence in html.unescape(shown["alert"]) and sentence in capsys.readouterr().err
    assert not {"panes", "result", "regions"} & set(shown)


@pytest.mark.parametrize("change", [{"max_new_tokens": 1}, {"prompt": "a"}, {"peers": False}, {"rescore": "none"}])
def test_small_and_other_studies_are_whole_ones(raw, change):
    shown = run(raw | change)
    assert "Done" in shown["status"] and set(channels.OUTPUTS) <= set(shown)


def test_without_peers_no_calibration_text_is_read(raw):
    lines = [update.get("status", "") for update in choosing.run(raw | {"peers": False}, {}, threading.Event(), "s")]
    assert not any("calibration" in line for line in lines)
    assert "FLAP" not in run(raw | {"peers": False})["methods"]


def test_stopping_keeps_what_was_written(raw, monkeypatch):
    def stopped_at_the_third_token(work, stop):
        posted = []

        def checkpoint():
            if posted and posted[-1].run and len(posted[-1].run.tokens) == 3:
                raise Cancelled

        work(posted.append, checkpoint)
        yield from posted

    with monkeypatch.context() as patch:
        patch.setattr(choosing, "watch", stopped_at_the_third_token)
        shown = run(raw)
    result = shown["result"]
    assert "Stopped" in shown["status"] and not result["complete"] and len(result["pruned"]["tokens"]) == 3
    assert "Stopped before the dense answer" in shown["answers_note"] and "(an empty answer)" not in shown["panes"]
    assert "class=differs" not in shown["pieces"]
    assert "not timed" in shown["speed"].layout.annotations[0].text and not shown["quality"].data
    assert run(raw)["result"]["complete"]  # the model is free


def test_stopped_before_the_first_token_nothing_changes(raw):
    stop = threading.Event()
    stop.set()
    shown = run(raw, stop)
    assert "Stopped before" in shown["status"] and not {"panes", "result"} & set(shown)


def test_a_failure_half_way_brings_the_figures_of_before_back(raw, monkeypatch):
    previous = run(raw)["result"]
    from pop_core import channel_study

    def broken(*arguments):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(channel_study, "interleaved", broken)
    monkeypatch.setattr(choosing, "so_far", lambda *_: {"panes": "an answer of the run that fails"})
    shown = run(raw, previous=previous)
    assert shown["result"] == previous and shown["panes"] != "an answer of the run that fails"
    assert "secret" not in shown["alert"] and shown["alert"]


def test_two_visitors_have_files_and_results_of_their_own(raw):
    shown, threads = {}, []
    for session, ratio in (("a", 0.3), ("b", 0.5)):
        work = threading.Thread(target=lambda s=session, r=ratio: shown.update({s: run(raw | {"ratio": r}, session=s)}))
        work.start()
        threads.append(work)
    for work in threads:
        work.join(120)
    for session, ratio in (("a", 0.3), ("b", 0.5)):
        saved = json.loads(Path(shown[session]["json"]).read_text(encoding="utf-8"))
        assert saved["plan"]["channels"]["ratio"] == ratio and saved["complete"]


def test_the_layer_changes_only_what_shows_it():
    first, second = choosing.chosen(RESULT, 0), choosing.chosen(RESULT, 29)
    assert set(first) == {"choices", "choices_note"} and first["choices_note"] != second["choices_note"]
    for wrong, sentence in ((30, "0 to 29"), (-1, "0 to 29"), (None, "whole number"), (math.nan, "whole number")):
        with pytest.raises(PopError, match=sentence):
            choosing.chosen(RESULT, wrong)
        assert choosing.usable_layer(RESULT, wrong) == 15


def test_the_forecast_follows_the_controls():
    assert "845 of 1,536 stay" in channels.looked_ahead("smollm2", 0.4, 0.1, "candidates")
    assert "24% of the whole model" in channels.looked_ahead("smollm2", 0.4, 0.1, "candidates")
    assert "nothing is pruned" in channels.looked_ahead("smollm2", 0, 0.1, "candidates")
    assert "must be 0 to 0.8" in channels.looked_ahead("smollm2", 0.4, 0.9, "candidates")
    assert "of 2,048 stay" in channels.looked_ahead("gemma3-270m", 0.4, 0.1, "candidates")
    assert "once it is loaded" in channels.looked_ahead("owner/name", 0.4, 0.1, "candidates")


def test_recorded_studies_are_shown_without_loading_a_model():
    for name in choosing.RECORDED:
        shown = channels.picked(name, 3)
        assert "Recorded with" in shown["status"] and set(channels.OUTPUTS) <= set(shown)
    assert "no recorded study" in channels.picked("owner/name", 3)["status"]


def test_the_page_opens_without_torch():
    code = "import sys, pages.channels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_links_set_the_same_channels_on_both_pages():
    result = RESULT | {"model": 'a/b"><script>', "plan": {"channels": RESULT["plan"]["channels"] | {"score": "l2"}}}
    assert "<script>" not in link_here(result) + link_to_compare(result)

    def parameters(anchor):
        query = html.unescape(anchor).split("?")[1].split('">')[0]
        return dict(part.split("=") for part in query.split("&"))

    own = channels.linked(parameters(link_here(RESULT)) | {"model": "smollm2", "score": "l2"})
    assert (own["ratio"], own["width"], own["rescore"], own["score"], own["alert"]) == (
        0.4,
        0.1,
        "candidates",
        "l2",
        "",
    )
    _, plan, sentence = links.read_query(parameters(link_to_compare(RESULT)), PrefillCut(1))
    assert plan.prefill.cutoff == 30 and plan.channels.ratio == 0.4 and not sentence
    for bad in (
        {"ratio": "x"},
        {"ratio": "abc", "width": "9"},
        {"score": "bogus"},
        {"rescore": "some"},
        {"width": "0.9"},
    ):
        assert channels.linked({"model": "smollm2"} | bad)["alert"]
    for key, value in (("width", 0.3), ("rescore", "all"), ("ratio", 0)):  # what a link leaves out is the page's own
        own = channels.linked({"model": "smollm2", key: str(value)})
        assert own[key] == value and not own["alert"] and own["ratio"] == (0.4 if key != "ratio" else 0)


def test_tokens_and_methods_are_escaped():
    result = json.loads(json.dumps(RESULT))
    result["pruned"]["pieces"][0] = result["methods"][3]["title"] = "<img src=x>"
    shown = choosing.shown(result, 0)
    for name in ("pieces", "methods", "panes"):
        assert "<img" not in shown[name]
    assert "&lt;img" in pieces(result) and "&lt;img" in shown["methods"]
    assert "<img" not in " ".join(shown["quality"].layout.yaxis.ticktext)


def test_tokens_that_differ_are_marked_on_both_sides():
    dense, pruned = RESULT["dense"]["tokens"], RESULT["pruned"]["tokens"]
    both = min(len(dense), len(pruned))
    differing = sum(a != b for a, b in zip(dense, pruned, strict=False))
    alone = len(dense) + len(pruned) - 2 * both  # the longer answer's rest has nothing in its place
    assert 0 < differing < both and pieces(RESULT).count("class=differs") == 2 * differing + alone


def test_the_tables_hold_what_the_run_did():
    rows = table.layer_rows(RESULT)
    for row, layer in zip(rows, view.layers(RESULT), strict=True):
        assert row["retained"] + row["candidates"] + row["pruned"] == row["channels"] == 1536
        assert row["left_out"] == view.left_out(layer)
    shown = table.display(table.method_rows(RESULT), table.METHOD_NAMES)
    assert all(cell for line in shown["data"] for cell in line)
    assert shown["data"][0][2] == "n/a"  # the dense model is not held against itself


def test_the_csv_round_trips_and_holds_no_formula():
    result = RESULT | {"model": "=1+1", "top_half": [None, *RESULT["top_half"][1:]]}
    for rows, names in (
        (table.method_rows(result), table.METHOD_NAMES),
        (table.layer_rows(result), table.LAYER_NAMES),
    ):
        text = table.csv_bytes(result, rows, names).decode("utf-8-sig")
        read = list(csv.DictReader(io.StringIO(text, newline="")))
        assert list(read[0]) == ["model", *names] and read[0]["model"] == "'=1+1"
        for written, row in zip(read, rows, strict=True):
            for key, value in row.items():
                assert written[key] == ("" if value is None else str(value))
