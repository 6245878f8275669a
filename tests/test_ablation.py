"""Leaving out layers for real: equal to gates of 0, to the stock model's states and to the cuts that an engine runs."""

from functools import partial

import pytest
from tiny import random_ids
from torch.nn.functional import cosine_similarity

from pop_core import gates
from pop_core.ablation import ablate, cut_divergence
from pop_core.divergence import divergence, mean
from pop_core.errors import Cancelled
from pop_core.plan import PrefillCut

TOKENS, BOUNDARY = 14, 9  # longer than the window
IDS = random_ids(TOKENS, seed=6)
PROMPT, CONTINUATION = IDS[:, : BOUNDARY + 1], IDS[:, BOUNDARY + 1 :]
STAGES = {"prefill": slice(0, BOUNDARY), "decode": slice(BOUNDARY, None)}


def kl(dense, pruned) -> float:
    return mean(divergence(dense, pruned)[0])


def test_what_leaving_out_a_layer_does_is_what_gates_of_zero_do(subject):
    decoder, found = subject.decoder, ablate(subject.decoder, IDS, BOUNDARY)
    dense = gates.gated_logits(decoder, IDS, BOUNDARY)[0]
    for stage, tokens in STAGES.items():
        for layer, value in enumerate(getattr(found, f"{stage}_kl")):
            closed = gates.ones(decoder, TOKENS)
            closed[layer, :, tokens] = 0
            expected = kl(dense, gates.gated_logits(decoder, IDS, BOUNDARY, closed)[0])
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_last_layer_means_exactly_nothing_to_the_prompt(subject):
    found = ablate(subject.decoder, IDS, BOUNDARY)
    assert len(found.prefill_kl) == len(found.decode_kl) == subject.layers
    assert found.prefill_kl[-1] == 0 and min(found.prefill_kl[:-1]) > 0 and min(found.decode_kl) > 0


def test_block_influence_is_one_minus_the_cosine_of_the_stock_states(subject):
    states = subject.model(IDS, output_hidden_states=True).hidden_states[:-1]  # the last one is after the final norm
    found = ablate(subject.decoder, IDS, BOUNDARY)
    for stage, tokens in STAGES.items():
        values = getattr(found, f"{stage}_influence")
        assert len(values) == subject.layers and all(0 <= value <= 2 for value in values)
        for value, before, after in zip(values, states, states[1:], strict=False):
            expected = 1 - cosine_similarity(before[0, tokens], after[0, tokens], dim=-1).mean()
            assert value == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("lowest", [1, 3])
def test_the_cost_of_a_cutoff_is_what_the_engine_s_prefill_costs(subject, lowest):
    found = cut_divergence(subject.decoder, IDS, BOUNDARY, lowest)
    dense = subject.write(subject.read(PROMPT), CONTINUATION)[0]
    assert len(found) == subject.layers - lowest
    for cutoff, value in enumerate(found, start=lowest):
        cut = PrefillCut(cutoff, sinks=0, boundary=1)
        expected = kl(dense, subject.write(subject.read(PROMPT, cut), CONTINUATION)[0])
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found[-1] < 1e-6 and min(found[:-1]) > 1e-4  # the prompt's last layer gives keys and values, nothing else


def test_a_single_new_token_is_enough(subject):
    """Then only the boundary token is left to decode."""
    found = ablate(subject.decoder, PROMPT, BOUNDARY)
    assert len(found.decode_kl) == subject.layers and min(found.decode_kl) > 0
    assert cut_divergence(subject.decoder, PROMPT, BOUNDARY, 2)[-1] < 1e-6


@pytest.mark.parametrize("calls", [0, 4])
@pytest.mark.parametrize("measure", [ablate, partial(cut_divergence, lowest=1)])
def test_a_checkpoint_abandons_it(subject, measure, calls):
    left = [None] * calls

    def stop():
        if not left:
            raise Cancelled
        left.pop()

    with pytest.raises(Cancelled):
        measure(subject.decoder, IDS, BOUNDARY, checkpoint=stop)
    assert not left
