"""Channels of mixtures: each expert by the tokens it got, and whole where it got none."""

import pytest
import torch
from channel_laws import IDS, TOKENS, run
from laws import Subject, gap

from pop_core.channel_facts import layer_facts
from pop_core.plan import ChannelPruning


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_experts_that_no_prompt_token_reached_stay_whole_and_are_counted(name):
    subject = Subject(name)
    logits, channels = run(subject, ChannelPruning(0.4, 0.2), IDS[:, :1])  # a prompt of one token
    spec = subject.decoder.spec
    assert logits.isfinite().all()
    for i in spec.sparse:
        facts = layer_facts(channels, i)
        routed = facts["tokens"][: spec.experts]
        assert sum(routed) == spec.experts_per_token and facts["tokens"][spec.experts :] == [1] * bool(spec.shared_ffn)
        assert facts["whole"] == [e for e, count in enumerate(routed) if not count]
        assert len(facts["whole"]) == spec.experts - spec.experts_per_token
    kept = sum(map(sum, channels.kept()))
    by_hand = sum(
        width if i in spec.sparse and e in layer_facts(channels, i)["whole"] else round(0.6 * width)
        for i in range(spec.layers)
        for e, width in enumerate(spec.ffn_widths(i))
    )
    assert kept == by_hand


def test_two_experts_with_equal_scores_are_resolved_as_the_model_does():
    subject = Subject("qwen3-moe")
    for i in subject.decoder.spec.sparse:
        gate = subject.decoder.layers[i].mlp.gate.weight
        gate[1].copy_(gate[0])
        gate[3].copy_(gate[0])
    assert gap(subject.write(subject.read(IDS), TOKENS)[0], subject.stock(torch.cat((IDS, TOKENS), 1))[0, 13:]) < 1e-4
    assert run(subject, ChannelPruning(0.4, 0.2))[0].isfinite().all()


def test_an_expert_that_nobody_ever_uses_changes_nothing():
    subject = Subject("qwen3-moe")
    before, _ = run(subject, ChannelPruning(0.4, 0.2))
    for i in subject.decoder.spec.sparse:
        mlp = subject.decoder.layers[i].mlp
        used = {e for e in range(5) for part in [IDS] if _reaches(subject, i, e, torch.cat((part, TOKENS), 1))}
        for e in set(range(5)) - used:
            mlp.experts.gate_up_proj[e] = torch.nan
    after, _ = run(subject, ChannelPruning(0.4, 0.2))
    assert gap(before, after) == 0


def _reaches(subject, layer, e, ids) -> bool:
    seen = []
    mlp = subject.decoder.layers[layer].mlp
    handle = mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[2]))
    subject.stock(ids)
    handle.remove()
    return bool((seen[0] == e).any())


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_the_numbers_of_a_mixture_are_sums_over_its_experts(name):
    pruning = ChannelPruning(0.5, 0.25)
    spec, channels = Subject(name).decoder.spec, run(Subject(name), pruning, IDS[:, :2])[1]
    for i in spec.sparse:
        facts, expected = layer_facts(channels, i), dict.fromkeys(("retained", "candidates", "pruned", "chosen"), 0)
        for e, width in enumerate(spec.ffn_widths(i)):
            if e in facts["whole"]:
                expected["retained"] += width
                continue
            budget = pruning.budget(width)
            for key in expected:
                expected[key] += getattr(budget, key)
        assert facts["whole"] and {key: facts[key] for key in expected} == expected
