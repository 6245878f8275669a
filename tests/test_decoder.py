"""The loop itself: fast paths against the modules they stand for, gradients against the stock model's."""

import pytest
import torch
from laws import gap
from tiny import random_ids

from pop_core.cache import KVCache
from pop_core.decoder import Decoder, Positions
from pop_core.prefill import PromptAttention


def logits_through_our_loop(decoder: Decoder, h: torch.Tensor) -> torch.Tensor:
    """All layers and the head on a residual stream `[1, T, hidden]`."""
    length = h.shape[1]
    cache = KVCache(decoder.spec, 1, length, decoder.devices, decoder.dtype)
    positions = Positions.build(decoder, length, h.device)
    attend, rope = PromptAttention(decoder, cache, positions, length), positions.span(0, length)
    for i in range(decoder.spec.layers):
        h = decoder.block(i, h, rope, attend)
    return decoder.head(h)


def a_dense_layer(subject):
    """One whose FFN is no mixture."""
    return next(layer for layer in subject.decoder.layers if hasattr(layer.mlp, "up_proj"))


def test_fast_paths_compute_what_the_modules_do(subject):
    decoder, layer = subject.decoder, a_dense_layer(subject)
    assert decoder.plain
    for length in (1, 5):
        x = torch.randn(1, length, decoder.spec.hidden)
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj, decoder.lm_head):
            assert gap(decoder.linear(module, x), module(x)) < 1e-5
        assert gap(decoder.normed(layer.input_layernorm, x), layer.input_layernorm(x)) < 1e-5
        act = layer.mlp.act_fn
        assert torch.equal(decoder.activated(act, x.clone()), act(x))


def test_a_model_with_anything_unusual_is_called_through_its_modules(subject):
    module = a_dense_layer(subject).mlp.up_proj
    weight = module.weight
    module.weight = torch.nn.Parameter(weight.half(), requires_grad=False)
    try:
        assert not Decoder(subject.model, subject.decoder.spec).plain
    finally:
        module.weight = weight


@pytest.mark.parametrize("length", [1, 12])
def test_gradients_are_those_of_the_stock_model(subject, length):
    """Nothing done in place may spoil a backward pass, and the input is left as it was."""
    embedded = subject.decoder.embed(random_ids(length))
    with torch.enable_grad():
        ours, stock = (embedded.clone().requires_grad_() for _ in range(2))
        logits_through_our_loop(subject.decoder, ours).square().mean().backward()
        subject.model(inputs_embeds=stock).logits.square().mean().backward()
    assert torch.equal(ours, embedded)
    assert gap(ours.grad, stock.grad) < 1e-4 * stock.grad.abs().max().item() + 1e-7
