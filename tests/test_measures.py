"""Comparison, quality, speed and costs: laws that hold for any numbers they may report."""

import json
import math

import pytest
import torch
from tiny import WINDOW
from tiny_files import tiny_folder

from pop_core import costs, quality
from pop_core.bench import bench_decode, bench_prefill
from pop_core.compare import compare, compare_steps, first_difference
from pop_core.divergence import divergence, negative_log_likelihood
from pop_core.engine import Engine
from pop_core.errors import Cancelled, PopError
from pop_core.loading import load_model
from pop_core.plan import DENSE, Plan, PrefillCut
from pop_core.run import median, ratio
from pop_core.samples import text_samples
from pop_core.sampling import Sampling
from pop_core.timing import interleaved, speedup

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps under the old tree"
CUT = Plan(PrefillCut(2))
LOSSLESS = Plan(PrefillCut(5))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    engine = Engine(load_model(str(tiny_folder(tmp_path_factory.mktemp("gemma3"), "gemma3"))))
    engine.ends = frozenset()
    return engine


@pytest.mark.parametrize("plan", [DENSE, LOSSLESS, Plan(PrefillCut(6))])
def test_a_lossless_plan_compares_as_equal(engine, plan):
    result = compare(engine, TEXT, plan, sampling=Sampling(12), repeats=1)
    assert result.first_divergence is None and result.agreement == 1.0
    assert result.kl == pytest.approx(0, abs=1e-6) and result.first_token_kl == pytest.approx(0, abs=1e-6)
    assert result.dense["text"] == result.pruned["text"] and result.complete


def test_a_comparison_is_two_single_runs(engine):
    result = compare(engine, TEXT, CUT, sampling=Sampling(12), repeats=2)
    assert result.dense["tokens"] == engine.generate(TEXT, DENSE, Sampling(12)).tokens
    assert result.pruned["tokens"] == engine.generate(TEXT, CUT, Sampling(12)).tokens
    assert result.first_divergence is not None and result.kl > 0 and result.agreement < 1
    assert result.paired_steps == 11 and result.prefill_repeats == 2
    low, high = result.pruned_prefill_spread
    assert low <= result.pruned_prefill_ms <= high
    json.dumps(result.to_dict(), allow_nan=False)


def test_an_answer_that_ends_early_does_not_look_fast(engine, monkeypatch):
    """Only steps made side by side are timed, and too few of them give no speed-up at all."""
    tokens = engine.generate(TEXT, CUT, Sampling(12)).tokens
    monkeypatch.setattr(engine, "ends", frozenset([tokens[2]]))
    result = compare(engine, TEXT, CUT, sampling=Sampling(12), repeats=1)
    lengths = len(result.dense["step_ms"]), len(result.pruned["step_ms"])
    assert result.paired_steps == min(lengths) < 4
    assert result.decode_speedup is None


def test_an_empty_answer_compares_without_dividing_by_zero(engine, monkeypatch):
    first = engine.generate(TEXT, DENSE, Sampling(1)).tokens[0]
    monkeypatch.setattr(engine, "ends", frozenset([first]))
    result = compare(engine, TEXT, LOSSLESS, sampling=Sampling(5), repeats=1)
    assert result.dense["new_tokens"] == result.pruned["new_tokens"] == 0
    assert result.decode_speedup is None and result.dense_step_ms is None and result.agreement == 1.0
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("calls", [0, 1, 8, 20, 40])
def test_a_stopped_comparison_is_a_valid_result(engine, calls):
    count = 0

    def checkpoint():
        nonlocal count
        count += 1
        if count > calls:
            raise Cancelled

    before = engine.generate(TEXT, CUT, Sampling(8)).tokens
    *_, last = compare_steps(engine, TEXT, CUT, sampling=Sampling(8), checkpoint=checkpoint)
    assert last.phase == "done" and not last.result.complete
    json.dumps(last.result.to_dict(), allow_nan=False)
    assert engine.generate(TEXT, CUT, Sampling(8)).tokens == before
    whole = compare(engine, TEXT, CUT, sampling=Sampling(8), repeats=1)
    assert whole.pruned["tokens"][: last.result.pruned["new_tokens"]] == last.result.pruned["tokens"]


def test_bad_input_is_refused_before_anything_runs(engine):
    for plan, text, sampling in (
        (Plan(PrefillCut(9)), TEXT, Sampling()),
        (CUT, "  ", Sampling()),
        (CUT, TEXT, Sampling(500)),
    ):
        with pytest.raises(PopError):
            next(compare_steps(engine, text, plan, sampling=sampling))
    for repeats in (-1, 1.5, None, "a"):
        with pytest.raises(PopError, match="repeats"):
            next(compare_steps(engine, TEXT, CUT, repeats=repeats))
    assert not engine._lock.locked()


def test_first_difference_is_the_index_of_the_first_other_token():
    run = lambda tokens: type("R", (), {"tokens": tokens})()  # noqa: E731
    assert first_difference(run([1, 2, 3]), run([1, 2, 3])) is None
    assert first_difference(run([1, 2, 3]), run([1, 5, 3])) == 1
    assert first_difference(run([1, 2, 3]), run([1, 2])) == 2
    assert first_difference(run([]), run([1])) == 0


def test_quality_orders_plans_and_dense_costs_nothing(engine):
    samples = text_samples(engine, TEXT * 12, 40, 10, 4, spread=False)
    plans = [DENSE, LOSSLESS, Plan(PrefillCut(3)), Plan(PrefillCut(1))]
    dense, lossless, cut, deeper = quality.measure(engine, samples, plans)
    assert dense.kl == 0 and dense.agreement == 1 and dense.loss == dense.loss_dense
    assert lossless.kl == pytest.approx(0, abs=1e-6)
    assert 0 < cut.kl < deeper.kl
    assert dense.tokens == 40 and dense.segments == 4


def test_quality_reads_the_loss_that_the_stock_model_has(engine):
    samples = text_samples(engine, TEXT * 4, 30, 8, 2, spread=False)
    measured = quality.measure(engine, samples, [DENSE])[0]
    ids = torch.tensor([sample.ids for sample in samples])
    logits = engine.loaded.model(ids).logits[:, 29:-1]
    assert measured.loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 30:].flatten()).item(), abs=1e-5
    )


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (400, 1, 1), (20, 20, 50)])
def test_quality_refuses_impossible_counts(engine, counts):
    with pytest.raises(PopError):
        quality.text_segments(engine, TEXT, *counts)


def test_divergence_is_zero_only_for_equal_distributions():
    logits = torch.randn(70, 11)
    kl, same = divergence(logits, logits + 3.0)  # a constant changes no probability
    assert max(kl) < 1e-6 and all(same)
    kl, same = divergence(torch.tensor([[0.0, math.log(3)]]), torch.tensor([[math.log(3), 0.0]]))
    assert kl == pytest.approx([0.5 * math.log(3)]) and same == [False]
    assert negative_log_likelihood(torch.zeros(2, 4), torch.tensor([0, 3])) == pytest.approx([math.log(4)] * 2)


@pytest.mark.parametrize("plan", [DENSE, CUT])
def test_bench_reports_every_key(engine, plan):
    prefill = bench_prefill(engine, 40, plan, repeats=2)
    decode = bench_decode(engine, 20, 6, plan)
    keys = ("ms", "ms_dense", "ms_stock", "speedup_vs_dense", "speedup_vs_stock", "limit_speedup", "fraction_of_limit")
    for report in (prefill, decode):
        assert all(report[key] for key in keys)
        assert report["spread"]["plan"][0] <= report["ms"] <= report["spread"]["plan"][1]
    assert decode["limit_speedup"] == 1 and decode["bytes_per_token"] == decode["bytes_per_token_dense"] > 0
    assert (prefill["limit_speedup"] > 1.5) == (plan is CUT)


def test_bench_refuses_what_does_not_fit(engine):
    for call in (
        lambda: bench_prefill(engine, 0, CUT),
        lambda: bench_prefill(engine, 500, CUT),
        lambda: bench_prefill(engine, 5, Plan(PrefillCut(7))),
        lambda: bench_decode(engine, 100, 100, CUT),
    ):
        with pytest.raises(PopError):
            call()


def test_flops_are_those_of_the_linear_layers_and_of_causal_pairs(engine):
    spec, n = engine.spec, 20
    linear = sum(
        p.numel() for name, p in engine.loaded.model.model.layers.named_parameters() if name.endswith("proj.weight")
    )
    assert costs.layer_parameters(spec, 0) * spec.layers == linear
    pairs = sum(min(i + 1, WINDOW) for i in range(n)) * 5 + n * (n + 1) / 2  # five sliding layers and a full one
    expected = n * 2 * linear + 4 * spec.heads * spec.head_dim * pairs + 2 * spec.hidden * spec.vocab
    assert costs.prefill_flops(spec, n) == expected
    assert costs.prefill_limit(spec, n, Plan(PrefillCut(6))) == 1
    assert costs.prefill_limit(spec, 3, Plan(PrefillCut(2, sinks=4, boundary=16))) == 1  # nothing to skip
    limits = [costs.prefill_limit(spec, 100, Plan(PrefillCut(c))) for c in range(1, 7)]
    assert limits == sorted(limits, reverse=True)


def test_every_round_runs_every_task_and_the_warm_up_is_not_counted():
    seen = []
    times = interleaved(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3, torch.device("cpu"), warm_up=1
    )
    assert "".join(seen) == "abbaabba"
    assert [len(t) for t in times.values()] == [3, 3]


def test_medians_and_ratios_of_nothing_are_none():
    assert median([]) is None and median([3.0, 1.0]) == 2.0 and median([5.0, 1.0, 2.0]) == 2.0
    assert ratio(1.0, 0.0) is None and ratio(None, 1.0) is None and ratio(3.0, 2.0) == 1.5
    assert speedup([], []) is None and speedup([2.0, 9.0, 3.0], [1.0, 3.0, 2.0]) == 1.5
