"""The Compare page without a browser: its handlers on a tiny model."""

import gc
import html
import json
import math
import re
import sys
import threading
import weakref
from pathlib import Path
from urllib.parse import parse_qsl

import gradio as gr
import pytest
from page_runs import collect, settings
from tiny_files import tiny_folder

from pages import api, compare, comparing, links, shared
from pop_core.channels import OnlineChannels
from pop_core.plan import PrefillCut

pytestmark = pytest.mark.usefixtures("no_toasts")


@pytest.fixture
def raw(tiny):
    """Settings as a page sends them."""
    return dict(
        model=tiny, prompt="what is this thing", cutoff=4, kv="own", sinks=1, boundary=2, ratio=0, width=0.1,
        rescore="candidates", max_new_tokens=6, temperature=0, top_p=1, top_k=0, seed=0, stop="", style="chat",
        repeats=1,
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
        ({"ratio": math.nan}, "must be a number from 0 to 1"),
        ({"ratio": "abc"}, "must be a number from 0 to 1"),
        ({"ratio": 2}, "must be a number from 0 to 1"),
        ({"ratio": -1}, "must be a number from 0 to 1"),
        ({"ratio": None}, "The prune ratio is empty"),
        ({"width": 2}, "must be a number from 0 to 1"),
        ({"width": None}, "The candidate width is empty"),
        ({"ratio": 0.2, "width": 0.9}, "half of the band lies on either side"),
        ({"rescore": "other"}, "must be one of candidates, none, all"),
        ({"rescore": None}, "must be one of candidates, none, all"),
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


@pytest.mark.parametrize("cutoff", [4, 6])
def test_channels_are_left_out_while_writing(raw, cutoff):
    shown = collect(comparing.run(raw | {"cutoff": cutoff, "ratio": 0.4}, {}, threading.Event(), "s"))
    dense, pruned = shown["result"]["dense"], shown["result"]["pruned"]
    assert pruned["plan"]["channels"]["ratio"] == 0.4 and pruned["channels"] and not dense["channels"]
    assert dense["removed_share"] == 0 < pruned["removed_share"]
    assert shown["result"]["predicted_decode_speedup"] > 1
    assert shown["panes"].count("of the FFN channels write") == 1
    query = dict(parse_qsl(html.unescape(re.search(r'href="\?(.*?)"', shown["link"])[1])))
    _, plan, sentence = links.read_query(query, PrefillCut(1))
    without_score = dict(plan.to_dict()["channels"], score=pruned["plan"]["channels"]["score"])
    assert not sentence and plan.to_dict() | {"channels": without_score} == pruned["plan"]


def test_measuring_holds_one_copy_of_the_channels(raw, monkeypatch):
    """The slices of the run that has written its answer are free before the prompt is read again."""
    parts, alive = [], []
    partition = OnlineChannels.partition

    def watched(channels):
        gc.collect()
        alive.append(sum(part() is not None for part in parts))
        partition(channels)
        parts.append(weakref.ref(channels))

    monkeypatch.setattr(OnlineChannels, "partition", watched)
    collect(comparing.run(raw | {"ratio": 0.4, "repeats": 3}, {}, threading.Event(), "s"))
    assert len(alive) == 5 and not any(alive)


def test_nothing_left_out_is_predicted_to_gain_nothing(result):
    assert result["predicted_decode_speedup"] == 1 and result["pruned"]["channels"] is None


def test_falling_back_to_own_projections_keeps_the_channels(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path))
    shown = collect(comparing.run(raw | {"kv": "fitted", "ratio": 0.3, "width": 0.2}, {}, threading.Event(), "s"))
    assert shown["result"]["pruned"]["plan"]["prefill"]["kv"] == "own"
    channels = shown["result"]["pruned"]["plan"]["channels"]
    assert (channels["ratio"], channels["width"]) == (0.3, 0.2)


def test_weights_that_cannot_be_read_are_told_before_anything_runs(raw, result, monkeypatch):
    engine = shared.MODELS.get(raw["model"])
    monkeypatch.setattr(engine.decoder, "readable", False)
    shown = collect(comparing.run(raw | {"ratio": 0.4}, result, threading.Event(), "s"))
    assert "packed or offloaded" in shown["alert"] and not {"panes", "result", "figure"} & set(shown)
    ahead = compare.looked_ahead(raw["model"], "x", "chat", 4, "own", 1, 2, 0.4, 0.1, "candidates")
    assert "packed or offloaded" in ahead
    assert "packed" not in compare.looked_ahead(raw["model"], "x", "chat", 4, "own", 1, 2, 0, 0.1, "candidates")


def test_stop_while_channels_are_left_out_keeps_what_there_is(raw):
    stop, shown = threading.Event(), {}
    for update in comparing.run(raw | {"max_new_tokens": 80, "ratio": 0.4}, {}, stop, "s"):
        if "panes" in update and not stop.is_set():
            assert "FFN channels" not in update["panes"]  # what they did is known at the end
            stop.set()
        shown |= update
    assert not shown["result"]["complete"] and "Stopped" in shown["status"]
    assert json.dumps(shown["result"], allow_nan=False)


def test_experts_left_whole_are_not_claimed_as_pruned(tmp_path):
    folder = str(tiny_folder(tmp_path, "qwen3-moe"))
    asked = settings(folder, prompt="a", style="plain", cutoff=6, ratio=0.4, width=0.2)
    shown = collect(comparing.run(asked, {}, threading.Event(), "s"))
    run, spec = shown["result"]["pruned"], shared.MODELS.get(folder).spec
    assert run["channels"]["whole_ffns"]
    kept = total = 0
    for i in range(spec.layers):
        whole = run["channels"]["layers"][i].get("whole", [])
        for e, width in enumerate(spec.ffn_widths(i)):
            total, kept = total + width, kept + (width if e in whole else round(0.6 * width))
    assert kept / total > 0.65
    assert f"{kept / total:.0%} of the FFN channels write" in shown["panes"]
    assert "60% of the FFN channels" not in shown["panes"] + shown["timing"]
    assert "reached by no prompt token" in shown["facts"]


def comparable(result: dict) -> dict:
    """What does not depend on the clock."""
    runs = {
        name: {key: result[name][key] for key in ("plan", "sampling", "tokens", "stop", "removed_share", "notices")}
        for name in ("dense", "pruned")
    }
    return runs | {key: result[key] for key in ("agreement", "kl", "predicted_decode_speedup", "first_divergence")}


@pytest.mark.parametrize("change", [{}, {"ratio": 0.4}, {"cutoff": 6, "ratio": 0.5, "rescore": "none"}])
def test_the_api_gives_what_the_page_shows(raw, change):
    page = collect(comparing.run(raw | change, {}, threading.Event(), "s"))["result"]
    assert comparable(api.compare(**(raw | change))) == comparable(page)


def test_the_api_prunes_no_channels_unless_asked(raw):
    asked = {key: value for key, value in raw.items() if key not in ("ratio", "width", "rescore")}
    assert comparable(api.compare(**asked)) == comparable(api.compare(**raw))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ratio": "abc"}, "The prune ratio is 'abc'; it must be a number from 0 to 1."),
        ({"ratio": 0.2, "width": 0.9}, "The candidate width is 0.9; at a prune ratio of 0.2 it must be 0 to 0.4, "),
        ({"rescore": 1}, "The rescore is '1'; it must be one of candidates, none, all."),
    ],
)
def test_the_api_refuses_in_one_sentence(raw, change, sentence):
    with pytest.raises(gr.Error) as refused:
        api.compare(**(raw | change))
    assert refused.value.message.startswith(sentence) and "\n" not in refused.value.message


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
