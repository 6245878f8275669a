"""The mixture-of-experts FFN (Qwen2-MoE, Qwen3-MoE): a router sends each token through a few experts.

The experts of a layer are slices of two fused weights: `gate_up_proj` `[E, 2I, hidden]`, gate first, and `down_proj`
`[E, hidden, I]`. In Qwen2-MoE all tokens also pass a shared expert, through a gate of its own.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from .ffn import FfnWeights, of_module

# (which expert, the tokens it gets among all [n], their states [n, hidden]) -> [n, hidden]
Expert = Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor]


def mixed(part, x: torch.Tensor, expert: Expert) -> torch.Tensor:
    """The layer's FFN on `[B, T, hidden]`. The shared expert, if there is one, is asked for by the number after the
    last, with None for all tokens."""
    states = x.flatten(0, -2)
    weights, chosen = route(part.gate, states)
    out = torch.zeros_like(states)
    for e in chosen.unique().tolist():
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, tokens, expert(e, tokens, states[tokens]) * weights[tokens, place, None])
    if hasattr(part, "shared_expert"):
        out = out + part.shared_expert_gate(states).sigmoid() * expert(part.gate.num_experts, None, states)
    return out.view_as(x)


def route(gate, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the experts of each token, both `[n, experts_per_token]`.

    As the model's own router, but in float64 where the model is.
    """
    logits = linear(states, gate.weight)
    shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, chosen = shares.topk(gate.top_k, dim=-1)
    if getattr(gate, "norm_topk_prob", True):  # Qwen3-VL's router has no choice
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(states.dtype), chosen


def weights_of(part) -> list[FfnWeights]:
    """The weights of each expert, views of the fused ones, and of the shared one if there is one."""
    fused = zip(part.experts.gate_up_proj, part.experts.down_proj, strict=True)
    found = [FfnWeights((gate_up,), None, down, None, part.experts.act_fn) for gate_up, down in fused]
    return found + ([of_module(part.shared_expert)] if hasattr(part, "shared_expert") else [])
