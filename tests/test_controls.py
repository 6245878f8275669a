"""Names that may be loaded, links, examples, and what the controls say beforehand."""

import subprocess
import sys
from dataclasses import replace
from random import Random
from urllib.parse import parse_qsl

import gradio as gr
import pytest

from pages import answers, compare, links, shared
from pop_core import recorded, sentences
from pop_core.errors import PopError
from pop_core.forecast import default_plan, forecast
from pop_core.plan import ALL, FITTED, NONE, OWN, RESCORES, ChannelPruning, Plan, PrefillCut


def test_a_public_space_opens_no_local_files(tiny, monkeypatch):
    assert shared.allowed_name(tiny) == tiny
    monkeypatch.setenv("SPACE_ID", "owner/space")
    for name in (
        tiny,
        "/etc/passwd",
        "/nowhere",
        "assets/calibration",
        "x.gguf",
        "../app.py",
        "~/x",
        "a/../b",
        "./x/y",
    ):
        with pytest.raises(PopError, match="public Space"):
            shared.allowed_name(name)
    for name in ("smollm2", "Qwen/Qwen3-0.6B", "https://huggingface.co/Qwen/Qwen3-0.6B"):
        assert shared.allowed_name(name) == name


def query_of(model: str, plan: Plan) -> dict:
    """A plan's link, as the page that it opens is given it."""
    settings = vars(plan.prefill) | (vars(plan.channels) if plan.channels else {})
    return dict(parse_qsl(links.to_query(model, settings)[1:]))


def test_a_link_brings_its_settings_back():
    random = Random(0)
    for _ in range(200):
        cut = PrefillCut(
            random.randint(1, 99), random.choice((OWN, FITTED)), random.randint(0, 9), random.randint(0, 99)
        )
        ratio = random.random()
        width = random.uniform(0, 2 * min(ratio, 1 - ratio))
        channels = random.choice((None, ChannelPruning(ratio, width, random.choice(RESCORES))))
        plan = Plan(cut, channels)
        assert links.read_query(query_of("owner/name", plan), PrefillCut(20)) == ("owner/name", plan, "")


def test_a_link_without_channels_leaves_all_of_them():
    query = links.to_query("smollm2", vars(PrefillCut(12, OWN, 2, 7)))
    assert "ratio" not in query and "width" not in query
    _, plan, sentence = links.read_query(dict(parse_qsl(query[1:])), PrefillCut(20))
    assert plan.channels is None and not sentence


@pytest.mark.parametrize(
    "bad",
    [
        {"cutoff": "abc"}, {"cutoff": "nan"}, {"cutoff": "-3"}, {"kv": "<b>"}, {"sinks": "1e999"},
        {"ratio": "abc"}, {"ratio": "nan"}, {"ratio": "2"}, {"ratio": "-1"}, {"width": "2"}, {"rescore": "<b>"},
    ],
)  # fmt: skip
def test_a_bad_link_is_a_sentence_and_defaults(bad):
    model, plan, sentence = links.read_query(bad, PrefillCut(20))
    assert (model, plan) == ("smollm2", Plan(PrefillCut(20))) and sentence


@pytest.mark.parametrize(
    ("bad", "kept"),
    [
        ({"ratio": "0.2", "width": "0.9"}, ChannelPruning(0.2)),  # too wide for this ratio
        ({"ratio": "0.03"}, None),  # the default width is too wide for it
        ({"ratio": "0.3", "rescore": "other"}, ChannelPruning(0.3)),
        ({"ratio": "0.3", "cutoff": "abc"}, ChannelPruning(0.3)),
    ],
)
def test_one_bad_setting_of_a_link_leaves_the_others(bad, kept):
    _, plan, sentence = links.read_query(bad, PrefillCut(20))
    assert plan == Plan(PrefillCut(20), kept) and sentence


def test_an_impossible_combination_is_told_while_the_controls_move():
    shown = compare.looked_ahead("smollm2", "x", "chat", 20, "own", 0, 1, 0.2, 0.9, "candidates")
    assert "The candidate width is 0.9" in shown and "problem" in shown
    assert "All FFN channels write" in compare.looked_ahead(
        "smollm2", "x", "chat", 20, "own", 0, 1, 0, 0.9, "candidates"
    )


def test_a_slider_hands_on_whatever_was_typed():
    made = gr.Slider(0, 12, value=8)
    for one in (made, type(made)(**made.constructor_args)):  # as Gradio makes it again once an update has changed it
        assert one.preprocess(20) == 20 and one.preprocess("abc") == "abc"


def test_pages_open_without_torch():
    code = "import sys, pages.compare, pages.channels; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_models_without_a_record_are_known_by_name_only():
    assert set(shared.EMBEDDED) >= set(shared.IMPORTANCE) and "shapes-vl" in shared.EMBEDDED
    for name in shared.EMBEDDED:
        assert name in shared.NO_LOCAL_FILES
        assert (shared.spec_of(name) is not None) >= (name in shared.IMPORTANCE)
    assert shared.spec_of([]) is None and shared.spec_of("owner/name") is None


def test_forecasts_say_what_the_plan_does():
    _, spec, _ = recorded.load(recorded.RECORDED / "compare-smollm2.json")
    plan = default_plan(spec.layers)
    assert plan == Plan(PrefillCut(20, "fitted", 4, 16))
    said = sentences.plan_sentence(forecast(plan, 30, 1000, spec))
    assert said.startswith("Skips 10 of 30 layers for the prompt, keeps all 30 for the answer; predicted prefill 1.4")
    assert "an assumed 512" in sentences.plan_sentence(forecast(plan, 30, None, spec))
    assert "Skips nothing" in sentences.plan_sentence(forecast(plan, 30, 20, spec))
    assert "Skips nothing" in sentences.plan_sentence(forecast(Plan(PrefillCut(30)), 30, 100, spec))
    with pytest.raises(PopError):
        forecast(Plan(PrefillCut(31)), 30)


SPEC = recorded.load(recorded.RECORDED / "compare-smollm2.json")[1]
MIXTURE = replace(SPEC, sparse=tuple(range(1, 30)), experts=8, experts_per_token=2, expert_ffn=256, shared_ffn=512)


def said(channels, cut=None, spec=SPEC) -> str:
    return sentences.plan_sentence(forecast(Plan(cut, channels), 30, 500, spec))


def test_channels_are_forecast_exactly():
    words = said(ChannelPruning(0.4), PrefillCut(20, FITTED, 4, 16))
    assert "Skips 10 of 30 layers" in words  # the cutoff is told all the same
    assert words.endswith(
        "The answer is written with 60% of the FFN channels: 845 of 1,536 stay, each token chooses 77 of 154 "
        "candidates, 537 go; 24% of the whole model goes, which allows at most 1.25× per token."
    )
    assert "922 of 1,536 stay, the same for every token" in said(ChannelPruning(0.4, 0.1, NONE))
    everything = said(ChannelPruning(0.4, 0.1, ALL))
    assert "each token chooses 922 of all 1,536" in everything and "no time is saved" in everything
    assert "All FFN channels write" in said(None)


def test_a_forecast_of_channels_says_what_may_stay_whole():
    mixture = said(ChannelPruning(0.4), spec=MIXTURE)
    assert all(f"in each {kind} " in mixture for kind in ("FFN", "expert", "shared expert"))
    assert "at most" in mixture and "experts that the prompt does not reach stay whole" in mixture
    unread = said(ChannelPruning(0.4), PrefillCut(20, boundary=0))
    assert "layers 20-29, which no prompt token runs, stay whole" in unread
    assert "stay whole" not in said(ChannelPruning(0.4), PrefillCut(20, boundary=1))
    assert "stay whole" not in said(ChannelPruning(0.4, 0.1, ALL), PrefillCut(20, boundary=0))  # nothing is scored


def test_the_strip_has_a_cell_for_each_layer():
    strip = answers.strip(30, 20)
    assert strip.count("<i") == 60 and strip.count("skipped") == 10 and "20 of 30" in strip and "style" not in strip
    unread = forecast(Plan(PrefillCut(20, boundary=0), ChannelPruning(0.4)), 30, 500, SPEC)
    strip = answers.strip(30, 20, unread.channels)
    assert strip.count("<i") == 60 and strip.count("60.0%") == 20 and "20 of them with 60%" in strip
