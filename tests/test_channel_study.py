"""A study of one prompt: the same numbers as measured alone, and what there is of one that was stopped."""

import json

import pytest
import torch
from tiny_files import tiny_folder

from pop_core import baselines, costs
from pop_core.channel_facts import top_half_overlap
from pop_core.channel_study import TITLES, study, study_steps
from pop_core.compare import compare
from pop_core.engine import Engine
from pop_core.errors import Cancelled, PopError
from pop_core.loading import load_model
from pop_core.plan import DENSE, ChannelPruning, Plan, PrefillCut
from pop_core.samples import Sample
from pop_core.sampling import Sampling

TEXT, ANSWER = "a dog and a cat walk into the old town", Sampling(12)
PLAN = Plan(channels=ChannelPruning(0.5, 0.3))


@pytest.fixture(scope="module", params=["llama-tied", "qwen2-moe"])
def engine(request, tmp_path_factory) -> Engine:
    made = Engine(load_model(str(tiny_folder(tmp_path_factory.mktemp(request.param), request.param))))
    *_, made.statistics = baselines.calibrate(made, [Sample(tuple(range(3, 60)), 57)])
    made.ends = frozenset()  # so that lengths are known
    return made


@pytest.fixture(scope="module")
def result(engine) -> dict:
    with torch.no_grad():
        return study(engine, TEXT, PLAN, sampling=ANSWER, rounds=5).to_dict()


def test_it_says_what_a_comparison_says(engine, result):
    alone = compare(engine, TEXT, PLAN, sampling=ANSWER, repeats=0)
    ours = next(row for row in result["methods"] if row["name"] == "plan")
    assert (ours["kl"], ours["agreement"], ours["first_token_kl"]) == (alone.kl, alone.agreement, alone.first_token_kl)
    assert result["pruned"]["tokens"] == alone.pruned["tokens"] and result["dense"]["tokens"] == alone.dense["tokens"]
    assert result["first_divergence"] == alone.first_divergence and result["tokens"] == 12
    assert ours["removed_share"] == alone.pruned["removed_share"] == result["pruned"]["removed_share"]


def test_every_method_is_held_against_the_dense_model(result):
    assert [row["name"] for row in result["methods"]] == list(TITLES)
    for row in result["methods"]:
        assert (row["kl"] is None) == (row["name"] == "dense") == (row["removed_share"] == 0)
        assert row["step_spread"][0] <= row["step_ms"] <= row["step_spread"][1]
        assert (row["partition_ms"] > 0) == (row["name"] in ("plan", "none", "all", "griffin"))
    assert result["complete"] and result["rounds"] == 5
    json.dumps(result, allow_nan=False)


def test_the_best_half_is_half_by_chance_and_whole_when_nothing_changes():
    same = torch.rand(1, 40).expand(9, -1)
    assert top_half_overlap(same) == 1
    flipped = torch.stack([torch.arange(40.0) * (-1) ** t for t in range(6)])
    assert top_half_overlap(flipped) == 0
    chance = top_half_overlap(torch.rand(300, 200, generator=torch.Generator().manual_seed(0)))
    assert abs(chance - 0.5) < 0.01
    assert top_half_overlap(torch.rand(1, 8)) is None and top_half_overlap(torch.rand(3, 1)) is None


def test_overlap_is_told_for_layers_with_one_ffn(engine, result):
    for i, (top_half, layer) in enumerate(zip(result["top_half"], result["pruned"]["channels"]["layers"], strict=True)):
        told = [top_half is not None, layer["overlap"] is not None]
        assert told == [i not in engine.spec.sparse] * 2


@pytest.mark.parametrize("phase", ["writing", "measuring", "timing"])
def test_stop_keeps_what_was_done(engine, phase):
    pressed = []

    def checkpoint():
        if pressed:
            raise Cancelled

    for progress in study_steps(engine, TEXT, PLAN, sampling=ANSWER, rounds=5, checkpoint=checkpoint):
        if progress.phase == phase and (phase != "writing" or progress.run.new_tokens > 3):
            pressed.append(True)
    stopped = progress.result
    assert progress.phase == "done" and not stopped.complete
    assert stopped.pruned["new_tokens"] > 3 and (stopped.methods[0]["step_ms"] is None)
    json.dumps(stopped.to_dict(), allow_nan=False)
    assert not engine._lock.locked() and engine.generate(TEXT, DENSE, Sampling(2)).new_tokens == 2


def test_stop_before_the_first_token_is_no_study(engine):
    def checkpoint():
        raise Cancelled

    with pytest.raises(Cancelled):
        list(study_steps(engine, TEXT, PLAN, sampling=ANSWER, checkpoint=checkpoint))
    assert not engine._lock.locked()


def test_what_does_not_fit_is_refused_before_anything_runs(engine):
    for plan in (DENSE, Plan(PrefillCut(3)), Plan(channels=ChannelPruning(0)), Plan(PrefillCut(7), PLAN.channels)):
        with pytest.raises(PopError):
            next(study_steps(engine, TEXT, plan))
    with pytest.raises(PopError, match="empty"):
        next(study_steps(engine, " ", PLAN))


def test_without_memory_for_all_copies_there_are_no_times_and_it_says_so(engine, monkeypatch):
    one = costs.sliced_bytes(engine.spec, PLAN.channels, 4)
    steps = study_steps(engine, TEXT, PLAN, sampling=ANSWER, rounds=5)
    for progress in steps:
        if progress.phase == "measuring":
            monkeypatch.setattr("pop_core.memory.free_bytes", lambda device: 2 * one)
    assert progress.result.methods[1]["kl"] > 0 and progress.result.methods[1]["step_ms"] is None
    assert any("no times were taken" in notice for notice in progress.result.notices)


def test_peers_can_be_left_out_and_the_plans_own_cut_stays(engine):
    both = Plan(PrefillCut(4), ChannelPruning(0.5, 0.3))
    result = study(engine, TEXT, both, sampling=Sampling(3), peers=False, rounds=1).to_dict()
    assert [row["name"] for row in result["methods"]] == ["dense", "plan", "none", "all", "griffin"]
    assert result["methods"][2]["plan"]["prefill"]["cutoff"] == 4
    fixed = Plan(channels=ChannelPruning(0.5, rescore="none"))
    names = [row["name"] for row in study(engine, TEXT, fixed, sampling=Sampling(2), peers=False, rounds=1).methods]
    assert names == ["dense", "plan", "all", "griffin"]  # the fixed mask is the plan itself


def test_an_answer_of_one_token_has_nothing_to_overlap(engine):
    result = study(engine, TEXT, PLAN, sampling=Sampling(1), peers=False, rounds=1).to_dict()
    assert result["pruned"]["channels"]["overlap"] is None and result["top_half"] == [None] * 6
    assert result["methods"][1]["kl"] >= 0
