"""A study in words: the sentences follow the data, and are as ready to say that pruning lost."""

import copy

import pytest
from studies import tiny_study
from tiny_files import tiny_folder

from pop_core import channel_findings as findings
from pop_core import channel_view as view
from pop_core import method_findings, recorded
from pop_core.plan import ALL, NONE

RECORDED, SPEC, _ = recorded.load(recorded.RECORDED / "channels-smollm2.json")


@pytest.fixture
def result() -> dict:
    return copy.deepcopy(RECORDED)


def all_sentences(result: dict) -> list[str]:
    singles = view.single(result) or [0]
    return [
        findings.caption(result),
        findings.answers_sentence(result),
        findings.map_sentence(result),
        findings.chosen_sentence(result, singles[0]),
        findings.overlap_sentence(result),
        method_findings.quality_sentence(result),
        method_findings.speed_sentence(result, 1.2),
        findings.experts_sentence(result),
        findings.ending(result),
    ]


@pytest.mark.parametrize("rescore", ["candidates", NONE, ALL])
@pytest.mark.parametrize("tokens", [1, 6])
def test_every_figure_has_a_sentence(llama, rescore, tokens):
    sentences = all_sentences(tiny_study(llama, rescore=rescore, tokens=tokens))
    assert all(sentence and "None" not in sentence and "nan" not in sentence for sentence in sentences)


def test_an_empty_answer_is_called_empty(llama):
    result = tiny_study(llama, tokens=1)
    assert "a single token" in findings.chosen_sentence(result, 0)
    for run in ("dense", "pruned"):
        result[run] |= {"tokens": [], "pieces": [], "text": "", "new_tokens": 0, "stop": "end"}
    assert "answer is empty" in findings.chosen_sentence(result, 0)
    assert "Both answers are empty" in findings.answers_sentence(result)


def test_a_dense_answer_that_was_stopped_is_not_said_to_differ(result):
    shared = result["first_divergence"]
    for count, words in ((0, "nothing is compared"), (shared, f"its first {shared} tokens are the same")):
        result["dense"] |= {"stop": "cancelled", "tokens": RECORDED["dense"]["tokens"][:count]}
        result["first_divergence"] = count
        assert words in findings.answers_sentence(result) and "part at" not in findings.answers_sentence(result)


def test_losing_time_is_called_losing(result):
    ours, dense = view.row(result, "plan"), view.row(result, "dense")
    ours["step_ms"] = dense["step_ms"] / 1.17
    assert "writes 1.17× as fast as dense" in method_findings.speed_sentence(result)
    assert "noise of the machine" not in method_findings.speed_sentence(result, 1.25)
    assert "at most 1.05×, so the rest is noise" in method_findings.speed_sentence(result, 1.05)
    ours["step_ms"] = 2 * dense["step_ms"]
    said = method_findings.speed_sentence(result)
    assert "Pruning loses" in said and "0.50×" in said and "which no answer makes good" in said
    ours["step_ms"] = dense["step_ms"]
    assert "no measurable difference" in method_findings.speed_sentence(result)
    ours["step_ms"] = None
    assert "no speed is claimed" in method_findings.speed_sentence(result)


def test_what_the_prompt_costs_is_set_against_what_a_token_gains(result):
    ours, dense = view.row(result, "plan"), view.row(result, "dense")
    ours |= {"partition_ms": 100.0, "step_ms": 8.0}
    dense["step_ms"] = 10.0
    assert "made good after 50 tokens" in method_findings.speed_sentence(result)


def test_a_closer_fixed_mask_is_called_closer(result):
    ours, fixed = view.row(result, "plan"), view.row(result, NONE)
    fixed["kl"] = ours["kl"] * 2
    assert "closer than a fixed mask" in method_findings.quality_sentence(result)
    fixed["kl"] = ours["kl"] / 2
    assert "Choosing by token loses" in method_findings.quality_sentence(result)
    fixed["kl"] = ours["kl"]
    assert "makes no difference to a fixed mask" in method_findings.quality_sentence(result)
    ours["kl"] = None
    assert "Stopped before" in method_findings.quality_sentence(result)


def test_the_closest_of_those_that_read_less_is_named(result):
    view.row(result, "flap")["kl"] = 0.001
    assert "FLAP is closest (0.001)" in method_findings.quality_sentence(result)
    for entry in result["methods"]:
        entry["kl"] = None if entry["kl"] is None else 1.0
    view.row(result, "plan")["kl"] = 0.5
    view.row(result, ALL)["kl"] = 0.0  # reads everything, so it is no rival
    assert "Candidates is the closest (0.5)" in method_findings.quality_sentence(result)


def test_methods_that_leave_out_less_are_told_apart(result):
    assert "leave out quite the same" not in method_findings.quality_sentence(result)
    view.row(result, "shortgpt")["removed_share"] = 0.1
    assert "10.0% to 23.7% of the model" in method_findings.quality_sentence(result)


@pytest.mark.parametrize(("value", "word"), [(0.5, "as chance alone"), (0.9, "more than"), (0.2, "less than")])
def test_overlap_is_held_against_chance(result, value, word):
    for layer in view.layers(result):
        layer["overlap"] = value
    assert word in findings.overlap_sentence(result)


def test_shares_come_from_the_run_and_not_from_what_was_asked_for(result):
    result["pruned"]["removed_share"] = 0.123
    assert "12% of the whole model" in findings.caption(result)
    assert "12% of the model's weights" in findings.answers_sentence(result)
    assert ("Left out of the whole model", "12%") in findings.facts(result)


def test_experts_that_stayed_whole_lower_the_share(tmp_path):
    result = tiny_study(tiny_folder(tmp_path, "qwen3-moe"), prompt="a")
    whole = sum(len(view.layers(result)[at]["whole"]) for at in view.mixtures(result))
    said = findings.experts_sentence(result)
    assert whole > 1 and f"the other {whole} stayed whole" in said and "where 40% was asked for" in said
    assert "no mixtures" in findings.experts_sentence(RECORDED)


def test_what_ended_early_says_what_is_missing(result):
    result["complete"] = False
    assert "fewer steps" in findings.ending(result)
    result["rounds"] = 0
    assert "rest was not measured" in findings.ending(result)
