"""Names that may be loaded, links, examples, and what the controls say beforehand."""

import pytest

from pages import answers, controls, links, shared
from pop_core import recorded, sentences
from pop_core.errors import PopError
from pop_core.forecast import default_plan, forecast
from pop_core.plan import Plan, PrefillCut


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


def test_a_link_brings_its_settings_back():
    cut = PrefillCut(12, "own", 2, 7)
    query = dict(pair.split("=") for pair in links.to_query("smollm2", vars(cut))[1:].split("&"))
    assert links.read_query(query, PrefillCut(20)) == ("smollm2", cut, "")


@pytest.mark.parametrize(
    "bad", [{"cutoff": "abc"}, {"cutoff": "nan"}, {"cutoff": "-3"}, {"kv": "<b>"}, {"sinks": "1e999"}]
)
def test_a_bad_link_is_a_sentence_and_defaults(bad):
    model, cut, sentence = links.read_query(bad, PrefillCut(20))
    assert (model, cut) == ("smollm2", PrefillCut(20)) and sentence


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


def test_the_strip_has_a_cell_for_each_layer():
    strip = answers.strip(30, 20)
    assert strip.count("<i") == 60 and strip.count("skipped") == 10 and "20 of 30" in strip


def test_examples_are_a_dozen_grouped_by_kind():
    kinds = [example["kind"] for example in controls.load_examples()]
    assert len(kinds) == 12 and len(set(kinds)) == sum(a != b for a, b in zip([None, *kinds], kinds, strict=False))
