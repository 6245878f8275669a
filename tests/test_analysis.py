"""The whole analysis on an engine: repeatable, stoppable, JSON, refused in a sentence, and harmless to other runs."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny import random_ids
from tiny_files import tiny_folder

from pop_core import analysis, importance, memory, quality, token_map
from pop_core.analysis import analyse, analyse_steps, sample_generator
from pop_core.costs import analysis_bytes
from pop_core.engine import Engine
from pop_core.errors import Cancelled, NotEnoughMemory, PopError
from pop_core.gates import gate_gradients
from pop_core.loading import load_model
from pop_core.plan import DENSE, Plan, PrefillCut
from pop_core.samples import Sample
from pop_core.sampling import Sampling

PROMPT, NEW = 9, 5  # together longer than the window
SAMPLES = [Sample(tuple(random_ids(PROMPT + NEW, seed=seed)[0].tolist()), PROMPT) for seed in range(5)]
KEYS = {"layer", "prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn", "prefill_se", "decode_se"}


@pytest.fixture(scope="module", params=["llama-tied", "qwen2-window", "gemma3"])
def engine(request, tmp_path_factory) -> Engine:
    return Engine(load_model(str(tiny_folder(tmp_path_factory.mktemp(request.param), request.param))))


def findings(result) -> dict:
    """A result without what the clock says."""
    found = {
        key: value for key, value in result.to_dict().items() if key not in ("seconds", "forward_equivalents", "date")
    }
    if found["ablation"]:
        found["ablation"].pop("seconds")
    return found


def cut(sample: Sample, length: int) -> Sample:
    return replace(sample, ids=sample.ids[:length])


def stop_after(calls: int):
    left = [None] * calls

    def checkpoint():
        if not left:
            raise Cancelled
        left.pop()

    return checkpoint


def test_a_seed_gives_one_result_and_another_seed_another(engine):
    first, again, other = (analyse(engine, SAMPLES, ablation=2, seed=seed) for seed in (7, 7, 8))
    assert findings(first) == findings(again)
    assert first.layers != other.layers and first.ablation["prefill_kl"] == other.ablation["prefill_kl"]


def test_the_order_of_the_samples_changes_nothing(engine):
    first, other = (analyse(engine, samples) for samples in (SAMPLES, SAMPLES[::-1]))
    assert first.layers == other.layers and first.recommended_cutoff == other.recommended_cutoff


def test_it_is_what_the_gates_of_each_sample_say(engine):
    squares = torch.zeros(engine.spec.layers, 2, dtype=torch.double)
    for sample in SAMPLES:
        ids = torch.tensor([sample.ids[:-1]])
        squares += gate_gradients(engine.decoder, ids, PROMPT - 1, sample_generator(4, sample)).prefill.square() / 2
    result = analyse(engine, SAMPLES, seed=4)
    for entry, expected in zip(result.layers, (squares / len(SAMPLES)).tolist(), strict=True):
        assert [entry["prefill_attention"], entry["prefill_ffn"]] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recompute", [False, True, None])
def test_the_result_says_what_was_asked_for_and_what_was_found(engine, recompute):
    with_ablation = analyse(engine, SAMPLES, ablation=3, tolerance=0.2, recompute=recompute, text="dogs")
    result, layers = json.loads(json.dumps(with_ablation.to_dict(), allow_nan=False)), engine.spec.layers
    assert [set(entry) for entry in result["layers"]] == [KEYS] * layers
    assert [entry["layer"] for entry in result["layers"]] == list(range(layers))
    assert result["layers"][-1]["prefill_attention"] == result["layers"][-1]["prefill_ffn"] == 0
    asked = dict(
        samples=5,
        requested=5,
        prompt_tokens=PROMPT,
        new_tokens=NEW,
        tolerance=0.2,
        text="dogs",
        notices=list(engine.loaded.notices),
    )
    assert (
        {key: result[key] for key in asked} == asked and result["complete"] and result["recompute"] is bool(recompute)
    )
    assert result["recommended_cutoff"] == importance.recommend(result["layers"], 0.2)
    assert result["seconds"] > 0 and result["forward_equivalents"] > 1
    assert [entry["cutoff"] for entry in result["cut_kl"]] == list(range(layers // 2, layers))
    assert result["cut_kl"][-1]["kl"] < 1e-6 and result["cut_samples"] == 1
    ablation = result["ablation"]
    assert ablation["samples"] == 3 and len(ablation["prefill_kl"]) == layers and ablation["prefill_kl"][-1] == 0
    assert all(-1 <= value <= 1 for value in ablation["spearman"].values()) and len(ablation["spearman"]) == 6
    for stage in importance.STAGES:
        totals = [importance.total(entry, stage) for entry in result["layers"]]
        assert result[f"spearman_{stage}"] == importance.rank_correlation(totals, ablation[f"{stage}_kl"])
    without = analyse(engine, SAMPLES)
    assert without.ablation is without.spearman_prefill is without.spearman_decode is None


@pytest.mark.parametrize("done", [1, 3, 5])
def test_stopping_keeps_the_samples_done(engine, done):
    """With 5 done it stops while measuring cutoffs."""
    calls = done * (1 + 2 * engine.spec.layers) + done // 5  # before each sample, and at each layer both ways
    stopped = analyse(engine, SAMPLES, seed=2, ablation=2, checkpoint=stop_after(calls))
    assert (stopped.samples, stopped.requested, stopped.complete) == (done, len(SAMPLES), False)
    assert stopped.layers == analyse(engine, SAMPLES[:done], seed=2).layers  # and the engine is free again
    assert stopped.cut_samples == 0 and stopped.cut_kl == [] and stopped.ablation is None


def test_stopping_before_the_first_sample_has_no_result(engine):
    with pytest.raises(Cancelled):
        analyse(engine, SAMPLES, checkpoint=stop_after(0))
    assert analyse(engine, SAMPLES[:1]).complete


def test_progress_goes_through_all_phases_and_each_step_has_a_result(engine):
    steps = []
    for progress in analyse_steps(engine, SAMPLES, ablation=2):
        steps.append((progress.phase, progress.done, progress.total))
        assert progress.done == 0 or json.dumps(progress.snapshot().to_dict(), allow_nan=False)
    gates = [("gates", done, 5) for done in range(6)]
    assert steps == [*gates, ("cutoffs", 1, 1), ("ablation", 1, 2), ("ablation", 2, 2), ("done", 5, 5)]


def test_leaving_an_analysis_behind_frees_the_engine(engine):
    steps = analyse_steps(engine, SAMPLES)
    next(steps)
    with pytest.raises(Cancelled):
        engine.generate("a dog", checkpoint=stop_after(0))
    steps.close()
    assert engine.generate("a dog", sampling=Sampling(2)).stop != "cancelled"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_unknown_and_never_a_number(engine, monkeypatch, bad):
    def broken(*arguments):
        found = gate_gradients(*arguments)
        found.by_token[2, 1, 3] = bad
        return found

    whole = analyse(engine, SAMPLES, ablation=1)
    monkeypatch.setattr(analysis, "gate_gradients", broken)
    result = analyse(engine, SAMPLES, ablation=1)
    json.dumps(result.to_dict(), allow_nan=False)
    assert result.layers[2] == whole.layers[2] | {"prefill_ffn": None, "prefill_se": None}
    assert result.layers[:2] + result.layers[3:] == whole.layers[:2] + whole.layers[3:]
    assert result.recommended_cutoff is None and result.spearman_prefill is None
    assert result.spearman_decode == whole.spearman_decode and result.token_map["ffn"][2][3] is None


@pytest.mark.parametrize("shown", [512, 13, 6, 3])
def test_the_token_map_is_half_the_squares_of_the_first_sample(engine, monkeypatch, shown):
    monkeypatch.setattr(token_map, "MAP_TOKENS", shown)
    result, sample = analyse(engine, SAMPLES, seed=3).token_map, SAMPLES[0]
    count = min(shown, PROMPT + NEW - 1)
    first = PROMPT + NEW - 1 - count
    assert result["first"] == first and result["boundary"] == max(0, PROMPT - 1 - first)
    assert result["pieces"] == [engine.loaded.tokenizer.decode([token]) for token in sample.ids[first:-1]]
    found = gate_gradients(engine.decoder, torch.tensor([sample.ids[:-1]]), PROMPT - 1, sample_generator(3, sample))
    for at, branch in enumerate(importance.BRANCHES):
        rows, squares = result[branch], found.by_token[:, at, first:].square() / 2
        assert len(rows) == engine.spec.layers and {len(row) for row in rows} == {count}
        for row, expected in zip(rows, squares.tolist(), strict=True):
            assert row == pytest.approx(expected, rel=5.01e-3) and row == [float(f"{value:.3g}") for value in row]
        assert [value == 0 for value in rows[-1]] == [place < result["boundary"] for place in range(count)]


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(samples=[]), "number of samples is 0"),
        (dict(samples=[SAMPLES[0], cut(SAMPLES[1], PROMPT + NEW - 1)]), "differ in length"),
        (dict(samples=[SAMPLES[0], replace(SAMPLES[1], prompt_tokens=PROMPT - 1)]), "differ in length"),
        (dict(samples=[cut(SAMPLES[0], 0)]), "at least 2"),
        (dict(samples=[replace(SAMPLES[0], prompt_tokens=1)]), "at least 2"),
        (dict(samples=[replace(SAMPLES[0], prompt_tokens=0)]), "at least 2"),
        (dict(samples=[cut(SAMPLES[0], PROMPT)]), "0 new ones"),
        (dict(samples=[cut(SAMPLES[0], PROMPT - 1)]), "-1 new ones"),
        (dict(samples=[Sample(tuple(random_ids(129)[0].tolist()), PROMPT)]), "together at most 128"),
        (dict(ablation=6), "it must be 0 to 5"),
        (dict(ablation=-1), "it must be 0 to 5"),
        (dict(ablation="x"), "whole number"),
        (dict(seed="x"), "whole number"),
        (dict(seed=0.5), "whole number"),
        (dict(seed=2**64), "below"),
        (dict(tolerance=1.5), "from 0 to 1"),
        (dict(tolerance=math.nan), "from 0 to 1"),
        (dict(tolerance=None), "from 0 to 1"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_before_anything_runs(engine, monkeypatch, change, sentence):
    monkeypatch.setattr(engine.decoder, "block", lambda *_: pytest.fail("it ran"))
    with pytest.raises(PopError, match=sentence) as caught:
        analyse(engine, **(dict(samples=SAMPLES) | change))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("limit, most", [("MOST_TOKENS", PROMPT + NEW), ("MOST_SAMPLES", len(SAMPLES))])
def test_limits_are_inclusive(engine, monkeypatch, limit, most):
    monkeypatch.setattr(importance, limit, most)
    assert analyse(engine, SAMPLES).complete
    monkeypatch.setattr(importance, limit, most - 1)
    with pytest.raises(PopError, match=f"{most - 1}"):
        analyse(engine, SAMPLES)


def test_a_token_that_the_model_does_not_know_is_one_sentence(engine):
    with pytest.raises(PopError, match="do not match"):
        analyse(engine, [Sample((*[3] * PROMPT, *[97] * NEW), PROMPT)])


def test_where_memory_is_short_layers_are_computed_again(engine, monkeypatch):
    shape = engine.spec, PROMPT + NEW - 1, NEW, engine.loaded.dtype.itemsize
    kept, short = (analysis_bytes(*shape, recompute=recompute) for recompute in (False, True))
    expected = analyse(engine, SAMPLES)
    assert short < kept and not expected.recompute
    monkeypatch.setattr(memory, "free_bytes", lambda device: kept)
    tight = analyse(engine, SAMPLES)
    assert tight.recompute and tight.layers == expected.layers
    assert not analyse(engine, SAMPLES, recompute=False).recompute
    monkeypatch.setattr(memory, "free_bytes", lambda device: short - 1)
    for recompute in (None, True, False):
        with pytest.raises(NotEnoughMemory, match="the analysis of a sample needs about"):
            analyse(engine, SAMPLES, recompute=recompute)


def test_other_runs_are_what_they_were(engine):
    plans = DENSE, Plan(PrefillCut(2)), Plan(PrefillCut(4, sinks=2, boundary=3))
    before = [engine.generate("a dog and a cat walk", plan, Sampling(20)).tokens for plan in plans]
    first = analyse(engine, SAMPLES, ablation=2)
    assert [engine.generate("a dog and a cat walk", plan, Sampling(20)).tokens for plan in plans] == before
    assert findings(analyse(engine, SAMPLES, ablation=2)) == findings(first)


def test_spread_pieces_cover_the_text_and_their_continuations_never_meet(engine, monkeypatch):
    """Token ids are their places in the text here."""
    for seed in range(150):
        rng = random.Random(seed)
        prompt, new, count = rng.randint(2, 30), rng.randint(1, 12), rng.randint(2, 60)
        size = prompt + new - 1  # a piece begins with BOS
        length = size + new * (count - 1) + rng.choice((0, 1, rng.randint(0, 2000)))
        monkeypatch.setattr(quality, "encode_text", lambda tokenizer, text, length=length: [*range(length)])
        pieces = quality.text_segments(engine, "", prompt, new, count, spread=True)
        assert pieces == quality.text_segments(engine, "", prompt, new, count, spread=True)
        assert len(pieces) == count and all(piece[0] == 1 and len(piece) == prompt + new for piece in pieces)
        assert all(piece[1:] == [*range(piece[1], piece[1] + size)] for piece in pieces)
        continuations = [place for piece in pieces for place in piece[prompt:]]
        assert len(set(continuations)) == len(continuations) == new * count
        assert min(piece[1] for piece in pieces) == 0 and max(continuations) == length - 1
        starts = sorted(piece[1] for piece in pieces)
        gaps = {after - before for before, after in pairwise(starts)}
        assert max(gaps) - min(gaps) <= 1


def test_pieces_in_a_row_follow_each_other(engine, monkeypatch):
    monkeypatch.setattr(quality, "encode_text", lambda tokenizer, text: [*range(100)])
    pieces = quality.text_segments(engine, "", 8, 3, 10)
    assert [place for piece in pieces for place in piece[1:]] == [*range(100)]


@pytest.mark.parametrize("spread, need", [(True, 10 + 3 * 9), (False, 10 * 10)])
def test_a_text_that_is_too_short_is_one_sentence_with_the_numbers(engine, spread, need):
    assert len(quality.text_segments(engine, "x" * need, 8, 3, 10, spread)) == 10
    sentence = f"The text has {need - 1} tokens; 10 (overlapping )?pieces of 10 tokens need at least {need}."
    with pytest.raises(PopError, match=sentence):
        quality.text_segments(engine, "x" * (need - 1), 8, 3, 10, spread)


@pytest.mark.parametrize("broken", ["gated_logits", "gate_gradients"])
def test_memory_that_runs_out_in_the_gates_is_one_sentence_and_the_model_is_free(engine, monkeypatch, broken):
    with monkeypatch.context() as patch, pytest.raises(NotEnoughMemory, match="use shorter ones"):
        patch.setattr(analysis, broken, lambda *_, **__: torch.empty(1 << 60))
        analyse(engine, SAMPLES)
    assert analyse(engine, SAMPLES).complete


@pytest.mark.parametrize("phase, broken", [("cutoffs", "cut_divergence"), ("ablation", "ablate")])
def test_memory_that_runs_out_after_the_gates_keeps_them(engine, monkeypatch, phase, broken):
    monkeypatch.setattr(analysis, broken, lambda *_, **__: torch.empty(1 << 60))
    result = analyse(engine, SAMPLES, ablation=2)
    assert result.samples == len(SAMPLES) and result.complete
    assert "Memory ran out" in result.notices[-1] and phase in result.notices[-1]


def test_a_divergence_that_is_not_finite_is_unknown_and_not_ranked(engine, monkeypatch):
    real = analysis.ablate

    def broken(*arguments):
        found = real(*arguments)
        found.prefill_kl[1] = math.nan
        return found

    monkeypatch.setattr(analysis, "ablate", broken)
    monkeypatch.setattr(analysis, "cut_divergence", lambda *_: [math.inf] * 3)
    result = analyse(engine, SAMPLES, ablation=2)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["ablation"]["prefill_kl"][1] is None
    assert result.spearman_prefill is None and result.spearman_decode is not None
    assert {entry["kl"] for entry in result.cut_kl} == {None}


@pytest.mark.parametrize("phase, steps", [("gates", 2), ("cutoffs", 6), ("ablation", 8)])
def test_a_result_says_in_which_phase_it_was_stopped(engine, phase, steps):
    seen = []

    def checkpoint():
        if len(seen) == steps:
            raise Cancelled

    for progress in analyse_steps(engine, SAMPLES, ablation=2, checkpoint=checkpoint):
        seen.append(progress)
    result = progress.snapshot()
    assert result.stopped_in == phase and not result.complete
    assert analyse(engine, SAMPLES).stopped_in is None


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sample_can_be_stopped_at_every_layer_both_ways(engine, recompute):
    """So a long sample ends soon after Stop."""
    ids, ticks = torch.tensor([SAMPLES[0].ids[:-1]]), []
    options = engine.decoder, ids, PROMPT - 1, sample_generator(0, SAMPLES[0]), recompute
    gate_gradients(*options, lambda: ticks.append(1))
    assert len(ticks) >= 2 * engine.spec.layers
    for calls in (0, len(ticks) - 1):
        with pytest.raises(Cancelled):
            gate_gradients(*options, stop_after(calls))
