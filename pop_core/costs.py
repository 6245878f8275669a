"""What a plan must compute and read at least: the limit that a measured speed-up is held against.

Prefill is bound by arithmetic, so its limit counts floating-point operations: the linear layers, causal attention,
the projections of skipped layers and the head for one token. Decode is bound by memory traffic, so its limit counts
the bytes of weights, keys and values that one step reads. An analysis is bound by the memory that it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .families import DecoderSpec
from .plan import DENSE, Plan

if TYPE_CHECKING:
    import torch


def layer_parameters(spec: DecoderSpec) -> int:
    """Weights in the linear layers of one decoder layer."""
    attention = 2 * spec.hidden * spec.head_dim * spec.heads + 2 * spec.hidden * spec.kv_width
    return attention + 3 * spec.hidden * spec.ffn


def prefill_flops(spec: DecoderSpec, tokens: int, plan: Plan = DENSE) -> float:
    """Floating-point operations to read a prompt of `tokens` tokens under a plan."""
    cut, linear = plan.prefill, 2 * layer_parameters(spec)
    cutoff = spec.layers if cut is None else min(cut.cutoff, spec.layers)
    sinks, boundary = (0, 0) if cut is None else (cut.sinks, cut.boundary)
    if sinks + boundary >= tokens:
        cutoff = spec.layers
    total = 2 * spec.hidden * spec.vocab
    for i in range(cutoff):
        total += tokens * linear + _attention_flops(spec, i, 0, tokens)
    for i in range(cutoff, spec.layers):
        total += tokens * 4 * spec.hidden * spec.kv_width + (sinks + boundary) * linear
        total += _attention_flops(spec, i, 0, sinks) + _attention_flops(spec, i, tokens - boundary, tokens)
    return total


def prefill_limit(spec: DecoderSpec, tokens: int, plan: Plan) -> float:
    """The speed-up over dense if time were exactly proportional to arithmetic."""
    return prefill_flops(spec, tokens) / prefill_flops(spec, tokens, plan)


def decode_bytes(spec: DecoderSpec, context: int, dtype: torch.dtype) -> int:
    """Bytes that one decode step reads after `context` tokens, one sequence at a time."""
    weights = spec.layers * layer_parameters(spec) + spec.hidden * spec.vocab
    seen = sum(min(spec.layer_window(i) or context, context) for i in range(spec.layers))
    return (weights + 2 * seen * spec.kv_width) * dtype.itemsize


def analysis_bytes(spec: DecoderSpec, tokens: int, labels: int, itemsize: int, recompute: bool) -> int:
    """What the backward pass of one sample of `tokens` tokens needs at its peak, in bytes, beside the model.

    Kept for each token and layer: the inputs of the norms, queries, keys, values and their mix, the gated branches and
    the three products of the FFN; with `recompute` only one residual stream a layer, and all that, with its gradients,
    for one layer.
    """
    attention = 2 * (spec.heads + spec.kv_width // spec.head_dim) * spec.head_dim
    wide = 8 if spec.post_norms else 6  # tensors of the residual stream's width
    kept = wide * spec.hidden + attention + 4 * spec.ffn
    if spec.qk_norm:
        kept += 2 * (spec.heads + spec.kv_heads) * spec.head_dim
    per_token = spec.layers * spec.hidden + 3 * kept if recompute else (spec.layers + 1) * kept
    windowed = sum((spec.layer_window(i) or tokens) < tokens for i in range(spec.layers))
    masks = min(windowed, 1) if recompute else windowed  # attention turns the mask into numbers again in each layer
    mask_bytes = tokens * tokens * (2 * bool(windowed) + masks * itemsize)
    return tokens * per_token * itemsize + 5 * labels * spec.vocab * 4 + mask_bytes


def ablation_bytes(spec: DecoderSpec, tokens: int, labels: int) -> int:
    """What leaving out every layer of a sample of `tokens` tokens needs at its peak, in bytes, beside the model: the
    states of a dense forward, and a batch of as many variants as there are layers, in float32."""
    kept = spec.layers * (2 * spec.hidden + 2 * spec.kv_width)
    batch = spec.layers * (4 * spec.hidden + 3 * spec.ffn + 3 * spec.heads * spec.head_dim)
    return 4 * (tokens * (kept + batch) + 4 * labels * spec.vocab)


def _attention_flops(spec: DecoderSpec, layer: int, start: int, stop: int) -> float:
    """Query-key and weight-value products of the causal queries `start .. stop-1`."""
    window = spec.layer_window(layer) or stop
    grown = max(0, min(stop, window) - start)  # queries that still see everything before them
    pairs = grown * start + grown * (grown + 1) / 2 + (stop - start - grown) * window
    return 4 * spec.heads * spec.head_dim * pairs
