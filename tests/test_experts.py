"""Mixtures of experts: ours is the model's own, whatever is routed where."""

import pytest
import torch
from laws import Subject, gap

from pop_core import costs, experts
from pop_core.plan import Plan, PrefillCut

MIXTURES = ("qwen2-moe", "qwen3-moe")


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (3, 4)])
def test_a_layer_is_the_models_own_module(name, readable, shape, monkeypatch):
    """On many tokens at once, on one, and where the weights cannot be read."""
    decoder = Subject(name).decoder
    monkeypatch.setattr(decoder, "readable", readable)
    for i in decoder.spec.sparse:
        x = torch.randn(*shape, decoder.spec.hidden, generator=torch.Generator().manual_seed(i))
        assert gap(decoder.ffn(i, x), decoder.layers[i].mlp(x)) < 1e-5


@pytest.mark.parametrize("name", MIXTURES)
def test_the_layers_that_are_mixtures_are_those_of_the_model(name):
    decoder = Subject(name).decoder
    assert decoder.spec.sparse == tuple(i for i, layer in enumerate(decoder.layers) if hasattr(layer.mlp, "experts"))
    assert 0 < len(decoder.spec.sparse) < decoder.spec.layers  # both kinds in one model
    for i, ffns in enumerate(decoder.ffns):
        assert [ffn.channels for ffn in ffns] == decoder.spec.ffn_widths(i)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_token_passes_as_many_experts_as_it_should(name):
    decoder = Subject(name).decoder
    for i in decoder.spec.sparse:
        seen = torch.zeros(20, dtype=torch.long)

        def count(e, tokens, states, seen=seen):
            if tokens is not None:
                seen[tokens] += 1
            return states

        experts.mixed(decoder.layers[i].mlp, torch.randn(4, 5, decoder.spec.hidden), count)
        assert (seen == decoder.spec.experts_per_token).all()


def test_the_weights_counted_are_the_models(subject):
    """All but norms, biases and routers."""
    spec, model = subject.decoder.spec, subject.model
    expected = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "norm" not in name and "bias" not in name and ".gate.weight" not in name and "expert_gate" not in name
    )
    assert costs.parameters(spec) == expected
    kept = [round(0.6 * width) for i in range(spec.layers) for width in spec.ffn_widths(i)]
    lost = sum(sum(spec.ffn_widths(i)) for i in range(spec.layers)) - sum(kept)
    assert costs.removed_share(spec, 0.4) == 3 * spec.hidden * lost / expected


@pytest.mark.parametrize("name", MIXTURES)
def test_prefill_only_pruning_works_on_mixtures(name):
    """The other laws of it run on every family; this one is about how much it saves."""
    spec = Subject(name).decoder.spec
    limits = [costs.prefill_limit(spec, 100, Plan(PrefillCut(c))) for c in range(1, spec.layers + 1)]
    assert limits == sorted(limits, reverse=True) and limits[-1] == 1
