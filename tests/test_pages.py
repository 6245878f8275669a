"""The pages without a browser: handlers on a tiny model, and everything that turns results into words and pictures."""

import html
import json
import math
import sys
import threading
from pathlib import Path

import pytest
from tiny_files import tiny_folder

from pages import answers, background, comparing, controls, export, links, shared, turns
from pop_core import recorded, sentences
from pop_core.errors import Cancelled, PopError
from pop_core.forecast import default_plan, forecast
from pop_core.plan import Plan, PrefillCut
from pop_core.plots import timing_figure
from pop_core.snippet import snippet

NASTY = "a</script><script>alert('x')</script> {b} ${1+1} \"\"\" ''' \\ \\n é\n\nsecond line " + "word " * 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("pages") / "llama", "llama"))


@pytest.fixture
def raw(tiny):
    """Settings as a page sends them."""
    return dict(
        model=tiny, prompt="what is this thing", cutoff=4, kv="own", sinks=1, boundary=2, max_new_tokens=6,
        temperature=0, top_p=1, top_k=0, seed=0, stop="", style="chat", repeats=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(tiny):
    """A real comparison on the tiny model."""
    return collect(comparing.run(settings(tiny), {}, threading.Event(), "test"))["result"]


@pytest.fixture(autouse=True)
def no_toasts(monkeypatch):
    monkeypatch.setattr(turns, "warn", lambda sentence: None)


def settings(model, **changes):
    values = dict(zip(comparing.NAMES, (model, "what is this thing", 4, "own", 1, 2, 6, 0, 1, 0, 0, "", "chat", 2)))  # noqa: B905
    return values | changes


def collect(updates) -> dict:
    """Everything that a page would show in the end."""
    shown = {}
    for update in updates:
        shown |= update
    return shown


# running


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


# background work


def test_watch_returns_results_and_raises_errors():
    def work(post, checkpoint):
        post(1)
        return "result"

    def returned(steps):
        return (yield from steps)

    steps, seen = returned(background.watch(work, threading.Event())), []
    with pytest.raises(StopIteration) as end:
        while True:
            seen.append(next(steps))
    assert end.value.value == "result" and seen == [1]
    with pytest.raises(ZeroDivisionError):
        list(background.watch(lambda post, checkpoint: 1 / 0, threading.Event()))


def test_an_impatient_watch_does_not_wait_for_work_that_hangs():
    stop, end = threading.Event(), threading.Event()
    steps = background.watch(lambda post, checkpoint: (post("begun"), end.wait(30)), stop, patient=False)
    assert next(steps) == "begun"
    stop.set()
    with pytest.raises(Cancelled):
        next(steps)
    end.set()


def test_each_session_has_its_own_flag():
    stops = background.Stops()
    a, b = stops.begin("a"), stops.begin("b")
    stops.stop("a")
    assert a.is_set() and not b.is_set() and stops.take_turn("a") is a
    assert not stops.begin("a").is_set()
    stops.forget("b")
    assert b.is_set() and stops.take_turn("b") is not b


def test_stop_knows_whether_work_is_under_way_or_still_waiting():
    stops = background.Stops()
    flag = stops.begin("a")
    assert not stops.stop("a") and flag.is_set()  # nobody will say that it stopped
    assert stops.take_turn("a") is flag  # when its turn comes, it finds the flag up
    assert stops.stop("a")
    stops.end_turn("a")
    assert not stops.stop("a")


# names, links, forecasts


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


# words and pictures


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


def test_the_snippet_is_the_same_run(result):
    scope = {"print": lambda *_: None}
    exec(snippet(result), scope)
    assert scope["result"].dense["tokens"] == result["dense"]["tokens"]
    assert scope["result"].pruned["tokens"] == result["pruned"]["tokens"]


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
        ({"prefill_speedup": 1.4, "complete": False}, "stopped early"),
        ({"dense_prefill_spread": [1.0, 9.0]}, "trust these times little"),
    ],
)
def test_the_timing_sentence_is_honest(result, change, words):
    assert words in sentences.timing_sentence(result | change)


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
