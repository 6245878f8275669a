"""A comparison in words and pictures: escaped, honest, nothing missing in silence."""

import json
import math
import threading

import pytest
from page_runs import collect, settings
from tiny import SHAPE

from pages import answers, comparing, export
from pop_core import Baseline, Engine, Plan, Sampling, baselines, channel_words, load_model, recorded, sentences
from pop_core.compare import compare
from pop_core.plots import timing_figure
from pop_core.snippet import snippet

NASTY = "a</script><script>alert('x')</script> {b} ${1+1} \"\"\" ''' \\ \\n é\n\nsecond line " + "word " * 60


def answer(text: str, **changes) -> dict:
    pieces = text.replace(" ", "\0 ").split("\0")
    return {"text": text, "pieces": pieces, "tokens": [hash(p) for p in pieces], "stop": "end", "layers": 6,
            "skipped_layers": 2, "new_tokens": len(pieces)} | changes  # fmt: skip


def test_differing_words_are_marked_and_the_first_token_flagged():
    a, b = answer("the cat sat on a mat"), answer("the cat lay on a rug now")
    assert answers.differing_spans(a["text"], b["text"]) == [(8, 11), (17, 20)]
    left = answers.marked(a, b)
    assert left.index("first-difference") < left.index("<mark>sat</mark>") and "<mark>mat</mark>" in left
    assert answers.marked(b, a).endswith("<mark>rug now</mark>")
    assert answers.marked(a, a) == a["text"]


@pytest.mark.parametrize(
    ("one", "other"), [("the cat", "the cat sat"), ("the cat sat", "the cat"), ("", "a b"), ("a b", "")]
)
def test_an_answer_that_ends_early_is_flagged_where_it_ends(one, other):
    marked = answers.marked(answer(one), answer(other))
    assert marked.count("first-difference") == 1


def test_no_text_becomes_markup(result):
    nasty = answer(NASTY)
    for finished in (True, False):
        shown = answers.panes(nasty, answer("quite <b>other</b>"), finished=finished)
        assert "<script" not in shown and "<b>" not in shown
    evil = json.loads(json.dumps(result))
    evil["dense"] |= {"model": "<img src=x>", "notices": ["<i>"]}
    evil["machine"] = "<u>"
    assert not {"<img", "<i>", "<u>"} & set(answers.facts(evil).split()) and "<img" not in answers.facts(evil)
    assert "<script" not in answers.alert(NASTY) + answers.note(NASTY) + answers.status(NASTY)
    assert (
        '"><'
        not in export.link('a"><script>', {"cutoff": 1, "kv": "own", "sinks": 0, "boundary": 1}).split("href")[1][:60]
    )


@pytest.fixture(scope="module", params=[{"cutoff": 6, "ratio": 0.4}, {"ratio": 0.5, "width": 0.3, "rescore": "none"}])
def with_channels(tiny, request) -> dict:
    """A comparison that leaves channels out, without a cutoff and with one."""
    return collect(comparing.run(settings(tiny, **request.param), {}, threading.Event(), "test"))["result"]


def repeated(result: dict) -> dict:
    """What the exported program gives."""
    scope = {"print": lambda *_: None}
    exec(snippet(result), scope)
    return scope["result"].to_dict()


def essence(result: dict) -> list:
    """What two comparisons have in common if they are of the same runs: all but times and dates."""
    keys = ("plan", "tokens", "removed_share", "skipped_layers", "stop")
    runs = [[result[name][key] for key in keys] for name in ("dense", "pruned")]
    return [*runs, result["agreement"], result["kl"]]


def test_the_snippet_is_the_same_run(result):
    assert essence(repeated(result)) == essence(result)


def test_the_snippet_of_channels_is_the_same_run(with_channels):
    again = repeated(with_channels)
    assert essence(again) == essence(with_channels)
    for a, b in zip(again["pruned"]["channels"]["layers"], with_channels["pruned"]["channels"]["layers"], strict=True):
        assert a["regions"] == b["regions"] and a["kept"] == b["kept"]


def test_the_snippet_of_a_baseline_is_the_same_run(tiny):
    engine, plan = Engine(load_model(tiny)), Plan(baseline=Baseline("wanda-sp", 0.4))
    baselines.ensure(engine, plan)
    result = compare(engine, "what is this thing", plan, sampling=Sampling(6), repeats=1).to_dict()
    assert essence(repeated(result | {"dense": result["dense"] | {"model": tiny}})) == essence(result)


@pytest.mark.parametrize("text", ["x", NASTY, "\n", "a\n", "word " * 50, "w" * 500, "\u2028 \u2063 '", "a\n\n\nb"])
def test_the_snippet_keeps_every_prompt(result, text):
    changed = json.loads(json.dumps(result))
    changed["dense"]["prompt"] = text
    statement = snippet(changed).split("engine = ")[0].split("\n", 2)[2]
    scope = {}
    exec(statement, scope)
    assert scope["prompt"] == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill_speedup": 1.4}, "as fast"),
        ({"prefill_speedup": 1.01}, "no measurable difference"),
        ({"prefill_speedup": 0.8}, "Pruning loses"),
        ({"prefill_speedup": None, "prefill_repeats": 0}, "no speed-up is claimed"),
        ({"dense_prefill_ms": None, "pruned_prefill_ms": None}, "nothing to compare"),
        (
            {"decode_speedup": None, "paired_steps": 1},
            "Too few tokens were written by both to time the writing (1 step)",
        ),
        ({"decode_speedup": 1.5}, "noise of the machine"),
        ({"decode_speedup": 1.0}, "Writing uses all layers in both, and takes the same time"),
        ({"prefill_speedup": 1.4, "complete": False}, "stopped early"),
        ({"dense_prefill_spread": [1.0, 9.0]}, "trust these times little"),
    ],
)
def test_the_timing_sentence_is_honest(result, change, words):
    assert words in sentences.timing_sentence(result | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_speedup": 1.1, "predicted_decode_speedup": 1.2}, "writing is 1.10× as fast"),
        ({"decode_speedup": 1.1, "predicted_decode_speedup": 1.2}, "allows at most 1.20×."),
        ({"decode_speedup": 1.5, "predicted_decode_speedup": 1.2}, "noise of the machine has a part in it"),
        ({"decode_speedup": 1.0}, "writing takes about the same time"),
        ({"decode_speedup": 0.8}, "Pruning loses: with"),
        ({"decode_speedup": None, "paired_steps": 1}, "Too few tokens"),
    ],
)
def test_the_timing_sentence_says_what_channels_gained_or_lost(with_channels, change, words):
    said = sentences.timing_sentence(with_channels | change)
    assert words in said and "uses all layers in both" not in said and "went into scoring" in said


@pytest.mark.parametrize(
    ("speedup", "words"), [(1.4, "which saves nothing"), (1.0, "no measurable difference"), (0.8, "at 0.80× the speed")]
)
def test_reading_with_all_layers_to_choose_channels_is_no_gain(tiny, speedup, words):
    chosen = collect(comparing.run(settings(tiny, cutoff=6, ratio=0.4), {}, threading.Event(), "s"))["result"]
    said = sentences.timing_sentence(chosen | {"prefill_speedup": speedup})
    assert words in said and "Nothing was skipped" not in said and "predicts" not in said


def test_channels_of_a_run_are_told_in_tiles_and_facts(with_channels, result):
    labels = [[label for label, *_ in sentences.tiles(r)] for r in (result, with_channels)]
    assert len(labels[0]) == len(labels[1]) == 4
    assert "Writing speed-up" in labels[1] and "Writing speed-up" not in labels[0]
    told = dict(sentences.facts(with_channels))
    assert not {"FFN channels that write", "Slicing, part of the reading"} & set(dict(sentences.facts(result)))
    kept, width = channel_words.written(with_channels["pruned"])
    spec, ratio = SHAPE, with_channels["pruned"]["plan"]["channels"]["ratio"]
    assert width == spec["num_hidden_layers"] * spec["intermediate_size"]
    assert kept == spec["num_hidden_layers"] * round((1 - ratio) * spec["intermediate_size"])
    assert told["FFN channels that write"].startswith(f"{kept:,} of {width:,}")


def test_a_pane_claims_no_channels_before_they_are_known(with_channels):
    run = with_channels["pruned"]
    assert "of the FFN channels write" in answers.panes(None, run, finished=True)
    streaming = answers.panes(None, run | {"channels": None})
    assert "FFN" not in streaming and f"{channel_words.percent(run['removed_share'])} of the model" in streaming
    assert "write" not in answers.panes(None, run | {"channels": None, "removed_share": 0.0})


def test_nothing_skipped_is_said(tiny):
    same = collect(comparing.run(settings(tiny, cutoff=6), {}, threading.Event(), "s"))["result"]
    assert "Nothing was skipped" in sentences.timing_sentence(same)
    assert "Both answers are the same" in sentences.difference_sentence(same)


def test_numbers_that_are_missing_are_named(result):
    missing = result | dict.fromkeys(("agreement", "first_token_kl", "kl", "prefill_speedup", "first_divergence"))
    assert [value for _, value, _ in sentences.tiles(missing)] == ["n/a", "n/a", "n/a", "none"]
    assert "before their agreement" in sentences.difference_sentence(missing)
    assert all(isinstance(value, str) for _, value in sentences.facts(missing))


@pytest.mark.parametrize(
    "missing", [(), ("dense_prefill_ms", "dense_prefill_spread", "pruned_step_ms", "pruned_step_spread")]
)
def test_the_figure_has_a_height_and_no_nan(result, missing):
    figure = timing_figure(result | dict.fromkeys(missing))
    assert figure.layout.height and "NaN" not in figure.to_json() and len(figure.data) == 4
    assert any("not measured" in bar.y[0] for bar in figure.data) == bool(missing)
    for bar in figure.data:
        assert all(math.isfinite(x) for x in bar.x)


def test_the_recorded_comparison_can_be_shown():
    result, spec, command = recorded.load(recorded.RECORDED / "compare-smollm2.json")
    assert result["complete"] and spec.layers == 30 and command
    assert "panes" in comparing.shown(result) and sentences.date(result["date"])
