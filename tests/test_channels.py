"""Channels chosen online: exact budgets, sliced equals masked, every sequence for itself, nothing left behind."""

import gc
import itertools
import weakref

import pytest
import torch
from channel_laws import CUT, IDS, TOKENS, Masked, run
from laws import Subject, gap
from tiny import random_ids

from pop_core.channels import CANDIDATE, PRUNED, RETAINED, OnlineChannels, column_norms
from pop_core.decode import StaticStep, extend
from pop_core.errors import PopError
from pop_core.lane import Lane
from pop_core.plan import ALL, CANDIDATES, GRIFFIN, NONE, SCORES, ChannelPruning, Plan, PrefillCut


@pytest.mark.parametrize(
    "pruning", [ChannelPruning(0.4, 0.3), ChannelPruning(0.55, rescore=NONE), ChannelPruning(0.3, rescore=ALL)]
)
@pytest.mark.parametrize("cut", [None, CUT])
def test_sliced_execution_equals_the_masked_reference(subject, pruning, cut):
    reference = Masked(subject, pruning)
    expected = subject.write(subject.read(IDS, cut, reading=reference.reading), TOKENS, reference.writing)
    found, _ = run(subject, pruning, cut=cut)
    assert gap(found, expected) < 1e-4
    dense = subject.write(subject.read(IDS, cut), TOKENS)
    assert gap(found[:, 0], dense[:, 0]) < 1e-5  # the prompt is read dense
    assert gap(found[:, 1:], dense[:, 1:]) > 1e-3  # and then something really goes


def test_the_widest_band_equals_scoring_all_channels_again(subject):
    ids = random_ids(80, seed=3)  # enough to reach nearly every expert
    everything, reference = run(subject, ChannelPruning(0.5, rescore=ALL), ids)
    widest, channels = run(subject, ChannelPruning(0.5, 1.0), ids)
    whole = [(i, e) for i, row in enumerate(channels.parts[0]) for e, part in enumerate(row) if part.whole]
    assert 2 * len(whole) < sum(map(len, channels.parts[0])) and (subject.decoder.spec.sparse or not whole)
    for i, e in whole:  # no partition, so there is no band to be the widest
        channels.parts[0][i][e] = reference.parts[0][i][e]
    again = subject.write(subject.read(ids), TOKENS, channels.writing)
    assert gap(again, everything) < 1e-5 and (whole or gap(widest, everything) < 1e-5)


def test_budgets_are_exact_for_odd_widths_and_extreme_ratios():
    ratios = (0.001, 0.01, 0.1, 1 / 3, 0.4, 0.5, 0.6, 0.77, 0.9, 0.999, 1.0)
    for size, ratio, part in itertools.product((1, 2, 3, 5, 47, 48, 1407, 1536), ratios, (0, 0.1, 0.5, 0.9, 1)):
        pruning = ChannelPruning(ratio, part * round(2 * min(ratio, 1 - ratio), 12))
        budget = pruning.budget(size)
        assert budget.retained + budget.chosen == budget.kept == round((1 - ratio) * size)
        assert budget.retained + budget.candidates + budget.pruned == size
        assert min(budget.retained, budget.candidates, budget.pruned) >= 0 and budget.chosen <= budget.candidates
        for rescore in (NONE, ALL):
            assert ChannelPruning(ratio, rescore=rescore).budget(size).kept == budget.kept
    for size in (1, 2, 3, 5, 47, 48, 1536):  # the widest band of all is everything
        assert ChannelPruning(0.5, 1.0).budget(size).candidates == size


@pytest.mark.parametrize("ratio", [0.02, 0.4, 0.97, 1.0])
def test_regions_and_choices_have_the_size_of_the_budget(subject, ratio):
    pruning = ChannelPruning(ratio, min(0.1, 2 * ratio, round(2 - 2 * ratio, 12)))
    _, channels = run(subject, pruning)
    for i, row in enumerate(channels.parts[0]):
        for e, part in enumerate(row):
            budget = pruning.budget(part.channels)
            if part.whole:
                assert part.weights is channels.decoder.ffns[i][e] and part.kept == part.channels
                continue
            sizes = [(part.region == kind).sum().item() for kind in (RETAINED, CANDIDATE, PRUNED)]
            assert sizes == [budget.retained, budget.candidates, budget.pruned]
            assert part.weights.channels - part.weights.filling == budget.sliced and part.kept == budget.kept
            # no pruned channel scores above a candidate, no candidate above a retained one
            lowest = [part.scores[part.region == kind].min() for kind in (RETAINED, CANDIDATE) if sizes[kind]]
            highest = [part.scores[part.region == kind].max() for kind in (CANDIDATE, PRUNED) if sizes[kind]]
            if all(sizes):
                assert lowest[0] >= highest[0] and lowest[1] >= highest[1]


@pytest.mark.parametrize("lane", [True, False])
def test_ties_of_the_partition_go_to_the_lower_index(lane, monkeypatch):
    if not lane:
        monkeypatch.setattr(Lane, "fits", lambda decoder, part: False)
    subject = Subject("llama")
    for layer in subject.decoder.layers:  # every activation and every score is 0
        layer.mlp.gate_proj.weight.zero_()
    pruning = ChannelPruning(0.5, 0.25)
    _, channels = run(subject, pruning)
    for (part,) in channels.parts[0]:
        assert part.region.tolist() == [RETAINED] * 18 + [CANDIDATE] * 12 + [PRUNED] * 18
    channels.note()
    assert all(len(set(lost.tolist())) == 6 for lost in channels.history[-1])  # the budget is exact all the same


@pytest.mark.parametrize("rescore", [CANDIDATES, NONE, ALL])
@pytest.mark.parametrize("cut", [None, CUT, PrefillCut(2, sinks=3, boundary=6)])
def test_a_sequence_does_not_depend_on_its_neighbours_or_their_padding(subject, rescore, cut):
    pruning = ChannelPruning(0.4, 0.2, rescore)
    rows = [random_ids(n, seed=n) for n in (13, 5, 8)]
    pad = torch.tensor([0, 8, 5])
    batch = torch.cat(
        [torch.cat((torch.zeros(1, int(p), dtype=torch.long), row), 1) for row, p in zip(rows, pad, strict=True)]
    )
    tokens = torch.cat([random_ids(4, seed=20 + n) for n in range(3)])
    together, _ = run(subject, pruning, batch, tokens, pad, cut)
    for at, row in enumerate(rows):
        alone, _ = run(subject, pruning, row, tokens[at : at + 1], cut=cut)
        assert gap(together[at : at + 1], alone) < 1e-4


@pytest.mark.parametrize("pruning", [ChannelPruning(0.4, 0.2), ChannelPruning(0.999, 0), ChannelPruning(1.0, 0)])
def test_many_known_tokens_at_once_equal_one_after_the_other(subject, pruning):
    """Also where an FFN keeps no channel at all."""
    stepped, channels = run(subject, pruning)
    _, cache, positions = subject.read(IDS)
    at_once = extend(subject.decoder, cache, positions, TOKENS, channels.writing)
    assert gap(at_once, stepped[:, 1:]) < 1e-4


def test_the_static_step_equals_the_plain_one(subject):
    _, channels = run(subject, ChannelPruning(0.4, 0.2))
    _, cache, positions = subject.read(IDS)
    step = StaticStep(subject.decoder, cache, positions, ffn=channels.writing)
    static = torch.stack([step(TOKENS[:, t : t + 1]).clone() for t in range(TOKENS.shape[1])], dim=1)
    assert gap(static, run(subject, ChannelPruning(0.4, 0.2))[0][:, 1:]) < 1e-4


def test_the_fast_lane_equals_the_general_way(subject, monkeypatch):
    fast, quick = run(subject, ChannelPruning(0.4, 0.3))
    assert any(quick._lanes.values())
    monkeypatch.setattr(Lane, "fits", lambda decoder, part: False)
    slow, general = run(subject, ChannelPruning(0.4, 0.3))
    assert gap(fast, slow) < 1e-5 and not any(general._lanes.values())
    quick.note(), general.note()
    for a, b in zip(quick.history[0], general.history[0], strict=True):
        assert (a is None) == (b is None) and (a is None or sorted(a.tolist()) == sorted(b.tolist()))


def test_all_candidates_or_none_chosen_and_all_channels_gone(subject):
    """The edges: a band of nothing but winners does not exist, but all channels may go."""
    gone, _ = run(subject, ChannelPruning(1.0, 0))
    reference = Masked(subject, ChannelPruning(1.0, 0))
    expected = subject.write(subject.read(IDS, reading=reference.reading), TOKENS, reference.writing)
    assert gap(gone, expected) < 1e-5


@pytest.mark.parametrize("kind", SCORES)
def test_scores_are_those_of_their_definition(kind):
    subject = Subject("qwen2")
    _, channels = run(subject, ChannelPruning(0.4, 0, NONE, kind))
    seen = {}
    handles = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x, i=i: seen.__setitem__(i, x[0][0]))
        for i, layer in enumerate(subject.model.model.layers)
    ]
    subject.stock(IDS)
    for handle in handles:
        handle.remove()
    for i, hidden in seen.items():
        down = subject.model.model.layers[i].mlp.down_proj.weight
        if kind == GRIFFIN:
            expected = (hidden / hidden.norm(dim=-1, keepdim=True)).norm(dim=0)
        else:
            columns = {"sum": down.abs().sum(0), "l2": down.norm(dim=0), "max": down.abs().amax(0)}[kind]
            expected = columns * hidden.norm(dim=0)
        assert gap(channels.parts[0][i][0].scores / expected, torch.ones(48)) < 1e-4


def test_padding_and_repeated_tokens_are_not_counted():
    """A short row whose sinks and boundary overlap names tokens twice; they count once."""
    subject = Subject("llama")
    row, pad = random_ids(4, seed=4), torch.tensor([0, 8])
    batch = torch.cat((random_ids(12, seed=5), torch.cat((torch.zeros(1, 8, dtype=torch.long), row), 1)))
    cut = PrefillCut(3, sinks=3, boundary=3)
    norms = column_norms(subject.decoder, "sum")
    together = OnlineChannels(subject.decoder, ChannelPruning(0.4), norms, 2)
    subject.read(batch, cut, pad, reading=together.reading)
    alone = OnlineChannels(subject.decoder, ChannelPruning(0.4), norms, 1)
    subject.read(row, cut, reading=alone.reading)
    for i in range(subject.layers):
        assert together.reached[i, 0] == [12 if i < 3 else 6, 4] and alone.reached[i, 0] == [4]
        assert gap(together.squares[i, 0][1], alone.squares[i, 0][0]) < 1e-4


@pytest.mark.parametrize("lane", [True, False])
def test_a_candidate_that_is_not_a_number_is_not_hidden(lane, monkeypatch):
    if not lane:
        monkeypatch.setattr(Lane, "fits", lambda decoder, part: False)
    subject = Subject("llama")
    state, channels = subject.read(IDS), run(subject, ChannelPruning(0.4, 0.2))[1]
    part = channels.parts[0][2][0]
    part.weights.ins[0][part.first + 1] = torch.nan  # a gate row of a candidate
    assert subject.write(state, TOKENS[:, :1], channels.writing)[:, 1].isnan().any()


def test_the_slices_belong_to_the_run_and_go_with_it(subject):
    _, channels = run(subject, ChannelPruning(0.4, 0.2))
    watched = [weakref.ref(part.weights.ins[0]) for row in channels.parts[0] for part in row if not part.whole]
    assert watched and all(ref() is not None for ref in watched)
    del channels
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_scoring_holds_the_activations_of_one_layer_at_a_time(subject):
    """What is kept of a layer is one number a channel."""
    norms = column_norms(subject.decoder, "sum")
    channels = OnlineChannels(subject.decoder, ChannelPruning(0.4), norms)
    subject.read(random_ids(50), reading=channels.reading)
    assert all(kept.shape == (1, subject.decoder.ffns[i][e].channels) for (i, e), kept in channels.squares.items())
    assert all(kept.untyped_storage().nbytes() == kept.numel() * 4 for kept in channels.squares.values())


@pytest.mark.parametrize(
    ("ratio", "width", "rescore", "score"),
    [
        (0.2, 0.41, CANDIDATES, "sum"), (0.9, 0.21, CANDIDATES, "sum"), (1.0, 0.1, CANDIDATES, "sum"),
        (-0.1, 0, NONE, "sum"), (1.1, 0, NONE, "sum"), (float("nan"), 0, NONE, "sum"), ("abc", 0, NONE, "sum"),
        (None, 0, NONE, "sum"), (True, 0, NONE, "sum"), (0.4, -0.1, CANDIDATES, "sum"), (0.4, 0.1, "some", "sum"),
        (0.4, 0.1, CANDIDATES, "mean"), (0.4, float("inf"), CANDIDATES, "sum"), (10**400, 0, NONE, "sum"),
    ],
)  # fmt: skip
def test_combinations_out_of_range_are_one_sentence_with_what_is_allowed(ratio, width, rescore, score):
    with pytest.raises(PopError, match=r"must be .*(\d|candidates|sum).*\.$"):
        ChannelPruning(ratio, width, rescore, score)


def test_the_width_does_not_matter_where_there_are_no_candidates():
    assert ChannelPruning(0, 0.1).budget(48).kept == 48
    assert ChannelPruning(0.01, 0.1, NONE).budget(48).candidates == 0
    assert ChannelPruning(0.9, 0.2).budget(48).retained == 0
    assert Plan(channels=ChannelPruning(0)).online is None
