"""The Compare page without a browser: its handlers on a tiny model."""

import html
import json
import math
import sys
import threading
from pathlib import Path

import pytest
from page_runs import collect

from pages import comparing, shared

pytestmark = pytest.mark.usefixtures("no_toasts")


@pytest.fixture
def raw(tiny):
    """Settings as a page sends them."""
    return dict(
        model=tiny, prompt="what is this thing", cutoff=4, kv="own", sinks=1, boundary=2, max_new_tokens=6,
        temperature=0, top_p=1, top_k=0, seed=0, stop="", style="chat", repeats=1,
    )  # fmt: skip


def test_a_run_shows_both_answers_and_everything_below(raw):
    updates = list(comparing.run(raw, {}, threading.Event(), "s"))
    shown = collect(updates)
    assert "Loading" in updates[0]["status"]
    assert shown["result"]["complete"] and "Done" in shown["status"] and shown["alert"] == ""
    assert {"panes", "figure", "timing", "tiles", "facts", "code", "download", "link", "difference"} <= set(shown)
    saved = json.loads(Path(shown["download"]).read_text(encoding="utf-8"))
    assert saved["dense"]["text"] == shown["result"]["dense"]["text"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": "  \n"}, "The prompt is empty"),
        ({"prompt": None}, "The prompt is empty"),
        ({"prompt": "x" * 200_001}, "at most 200,000"),
        ({"prompt": "x" * 5_000}, "fit this model's context"),
        ({"cutoff": 7}, "this model has 6 layers"),
        ({"cutoff": "abc"}, "must be a whole number"),
        ({"cutoff": None}, "must be a whole number"),
        ({"cutoff": math.nan}, "must be a whole number"),
        ({"cutoff": 1e9}, "this model has 6 layers"),
        ({"sinks": -1}, "must not be negative"),
        ({"kv": "other"}, "must be 'own' or 'fitted'"),
        ({"temperature": math.inf}, "must be a number between"),
        ({"repeats": 1e9}, "between 1 and 20"),
        ({"style": "other"}, "must be 'chat' or 'plain'"),
        ({"max_new_tokens": 0}, "must be at least 1"),
        ({"model": "no such model"}, "no local folder"),
        ({"model": None}, "No model is named"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_lost(raw, capsys, change, sentence):
    shown = collect(comparing.run(raw | change, {}, threading.Event(), "s"))
    assert sentence in html.unescape(shown["alert"])
    assert sentence in capsys.readouterr().err
    assert not {"panes", "result", "figure"} & set(shown)


def test_an_unforeseen_error_keeps_its_traceback_off_the_page(raw, result, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(sys.modules["pop_core.compare"], "_result", broken)
    shown = collect(comparing.run(raw, result, threading.Event(), "s"))
    assert shared.UNEXPECTED in html.unescape(shown["alert"]) and "secret" not in shown["alert"]
    assert "secret detail" in capsys.readouterr().err
    assert shown["result"] == result  # what was on screen before is there again


def test_stop_before_the_turn_comes_stops_it(raw):
    stop = threading.Event()
    stop.set()
    assert "Stopped" in collect(comparing.run(raw, {}, stop, "s"))["status"]


def test_stop_in_the_middle_keeps_what_there_is(raw):
    stop, shown = threading.Event(), {}
    for update in comparing.run(raw | {"max_new_tokens": 80, "repeats": 20}, {}, stop, "s"):
        shown |= update
        if "panes" in update:
            stop.set()
    assert not shown["result"]["complete"] and "Stopped" in shown["status"]
    assert "timing" in shown and json.dumps(shown["result"], allow_nan=False)
    again = collect(comparing.run(raw, {}, threading.Event(), "s"))  # the model is free
    assert again["result"]["complete"]


def test_an_abandoned_page_frees_the_model(raw):
    updates = comparing.run(raw | {"max_new_tokens": 80, "repeats": 20}, {}, threading.Event(), "s")
    while "panes" not in next(updates):
        pass
    # the generator stays suspended, as Gradio leaves it when a visitor goes away
    assert collect(comparing.run(raw, {}, threading.Event(), "other"))["result"]["complete"]


def test_own_projections_stand_in_until_fitted_ones_are_there(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path))
    fitted = raw | {"kv": "fitted"}
    shown = collect(comparing.run(fitted, {}, threading.Event(), "s"))
    assert "Fitting takes about" in shown["fit_note"] and shown["fit"]["visible"]
    assert shown["result"]["pruned"]["plan"]["prefill"]["kv"] == "own"


def test_fitting_shows_progress_and_can_be_stopped(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path))
    fitted = raw | {"kv": "fitted", "cutoff": 5}
    stop = threading.Event()
    for update in comparing.fit(fitted, {}, stop, "s"):
        if "progress" in update.get("status", ""):
            stop.set()
    assert "nothing was saved" in update["status"] and not list(tmp_path.rglob("*.safetensors"))
    shown = collect(comparing.fit(fitted, {}, threading.Event(), "s"))
    assert "Fitted" in shown["status"] and shown["fit"]["visible"] is False
    shown = collect(comparing.run(fitted, {}, threading.Event(), "s"))
    assert shown["result"]["pruned"]["plan"]["prefill"]["kv"] == "fitted" and not shown["fit_note"]


def test_picking_a_model_sets_the_range_of_the_cutoff(raw):
    shown = collect(comparing.pick(raw, {}, threading.Event(), "s"))
    assert shown["cutoff"]["maximum"] == 6 and shown["cutoff"]["value"] == 4
