"""What a plan must compute and read at least: the limit that a measured speed-up is held against.

Prefill is bound by arithmetic, so its limit counts floating-point operations: the linear layers, causal attention,
the projections of skipped layers and the head for one token. Decode is bound by memory traffic, so its limit counts
the bytes of weights, keys and values that one step reads. An analysis is bound by the memory that it holds.
"""

from .families import DecoderSpec
from .plan import DENSE, ChannelPruning, Plan


def attention_parameters(spec: DecoderSpec) -> int:
    """Weights in the linear layers of one layer's attention."""
    return 2 * spec.hidden * spec.head_dim * spec.heads + 2 * spec.hidden * spec.kv_width


def passed_channels(spec: DecoderSpec, layer: int) -> int:
    """FFN channels of a layer that one token passes."""
    return spec.experts_per_token * spec.expert_ffn + spec.shared_ffn if layer in spec.sparse else spec.ffn


def layer_parameters(spec: DecoderSpec, layer: int) -> int:
    """Weights in the linear layers of one decoder layer that one token passes."""
    router = spec.hidden * (spec.experts + bool(spec.shared_ffn)) if layer in spec.sparse else 0
    return attention_parameters(spec) + router + 3 * spec.hidden * passed_channels(spec, layer)


def ffn_parameters(spec: DecoderSpec) -> int:
    """Weights in all FFNs, experts included."""
    return 3 * spec.hidden * sum(sum(spec.ffn_widths(i)) for i in range(spec.layers))


def ffn_share(spec: DecoderSpec) -> float:
    """Share of the layers' weights that are in FFNs."""
    return ffn_parameters(spec) / layer_weights(spec)


def layer_weights(spec: DecoderSpec) -> int:
    """Weights of all layers but for norms, biases and routers."""
    return spec.layers * attention_parameters(spec) + ffn_parameters(spec)


def parameters(spec: DecoderSpec) -> int:
    """The same of the whole model, tied ones once."""
    return spec.vocab * spec.hidden * (1 if spec.tied else 2) + layer_weights(spec)


def removed_share(spec: DecoderSpec, ratio: float) -> float:
    """Share of the whole model that contributes nothing to a token when every FFN loses `ratio` of its channels."""
    lost = sum(width - round((1 - ratio) * width) for i in range(spec.layers) for width in spec.ffn_widths(i))
    return 3 * spec.hidden * lost / parameters(spec)


def sliced_bytes(spec: DecoderSpec, pruning: ChannelPruning, itemsize: int) -> int:
    """What the copies of the retained and candidate channels take."""
    channels = sum(pruning.budget(width).sliced for i in range(spec.layers) for width in spec.ffn_widths(i))
    return 3 * spec.hidden * channels * itemsize


def prefill_flops(spec: DecoderSpec, tokens: int, plan: Plan = DENSE) -> float:
    """Floating-point operations to read a prompt of `tokens` tokens under a plan."""
    cut = plan.prefill
    cutoff = spec.layers if cut is None else min(cut.cutoff, spec.layers)
    sinks, boundary = (0, 0) if cut is None else (cut.sinks, cut.boundary)
    if sinks + boundary >= tokens:
        cutoff = spec.layers
    total = 2 * spec.hidden * spec.vocab
    for i in range(spec.layers):
        linear = 2 * layer_parameters(spec, i)
        if i < cutoff:
            total += tokens * linear + _attention_flops(spec, i, 0, tokens)
            continue
        total += tokens * 4 * spec.hidden * spec.kv_width + (sinks + boundary) * linear
        total += _attention_flops(spec, i, 0, sinks) + _attention_flops(spec, i, tokens - boundary, tokens)
    return total


def prefill_limit(spec: DecoderSpec, tokens: int, plan: Plan) -> float:
    """The speed-up over dense if time were exactly proportional to arithmetic."""
    return prefill_flops(spec, tokens) / prefill_flops(spec, tokens, plan)


def decode_bytes(spec: DecoderSpec, context: int, itemsize: int, ffn_bytes: float | None = None) -> float:
    """Bytes that one decode step reads after `context` tokens, one sequence at a time. ffn_bytes: of the FFNs' weights,
    where they are not those of the dense model."""
    ffns = 3 * spec.hidden * sum(passed_channels(spec, i) for i in range(spec.layers))
    weights = sum(layer_parameters(spec, i) for i in range(spec.layers)) - ffns + spec.hidden * spec.vocab
    seen = sum(min(spec.layer_window(i) or context, context) for i in range(spec.layers))
    return (weights + 2 * seen * spec.kv_width) * itemsize + (ffns * itemsize if ffn_bytes is None else ffn_bytes)


def decode_limit(spec: DecoderSpec, context: int, pruning: ChannelPruning, itemsize: int) -> float:
    """The speed-up over dense if time were exactly proportional to the bytes read, every expert sliced."""
    read = 0
    for i in range(spec.layers):
        shared = [spec.shared_ffn] * bool(spec.shared_ffn)
        widths = [spec.expert_ffn] * spec.experts_per_token + shared if i in spec.sparse else [spec.ffn]
        read += 3 * spec.hidden * sum(pruning.budget(width).sliced for width in widths) * itemsize
    return decode_bytes(spec, context, itemsize) / decode_bytes(spec, context, itemsize, read)


def analysis_bytes(spec: DecoderSpec, tokens: int, labels: int, itemsize: int, recompute: bool) -> int:
    """What the backward pass of one sample of `tokens` tokens needs at its peak, in bytes, beside the model.

    Kept for each token and layer: the inputs of the norms, queries, keys, values and their mix, the gated branches and
    the three products of the FFN; with `recompute` only one residual stream a layer, and all that, with its gradients,
    for one layer.
    """
    attention = 2 * (spec.heads + spec.kv_width // spec.head_dim) * spec.head_dim
    wide = 8 if spec.post_norms else 6  # tensors of the residual stream's width
    common = wide * spec.hidden + attention
    if spec.qk_norm:
        common += 2 * (spec.heads + spec.kv_heads) * spec.head_dim
    kept = [common + 4 * passed_channels(spec, i) + _mixture_states(spec, i) for i in range(spec.layers)]
    per_token = spec.layers * spec.hidden + 3 * max(kept) if recompute else sum(kept) + max(kept)
    windowed = sum((spec.layer_window(i) or tokens) < tokens for i in range(spec.layers))
    masks = min(windowed, 1) if recompute else windowed  # attention turns the mask into numbers again in each layer
    mask_bytes = tokens * tokens * (2 * bool(windowed) + masks * itemsize)
    return tokens * per_token * itemsize + 5 * labels * spec.vocab * 4 + mask_bytes


def ablation_bytes(spec: DecoderSpec, tokens: int, labels: int) -> int:
    """What leaving out every layer of a sample of `tokens` tokens needs at its peak, in bytes, beside the model: the
    states of a dense forward, and a batch of as many variants as there are layers, in float32."""
    kept = spec.layers * (2 * spec.hidden + 2 * spec.kv_width)
    widest = max(3 * passed_channels(spec, i) + _mixture_states(spec, i) for i in range(spec.layers))
    batch = spec.layers * (4 * spec.hidden + widest + 3 * spec.heads * spec.head_dim)
    return 4 * (tokens * (kept + batch) + 4 * labels * spec.vocab)


def _mixture_states(spec: DecoderSpec, layer: int) -> int:
    """Numbers a token that a mixture keeps beside its FFNs': what the experts are given and what they give, and the
    router's."""
    if layer not in spec.sparse:
        return 0
    return 2 * (spec.experts_per_token + bool(spec.shared_ffn)) * spec.hidden + spec.experts


def _attention_flops(spec: DecoderSpec, layer: int, start: int, stop: int) -> float:
    """Query-key and weight-value products of the causal queries `start .. stop-1`."""
    window = spec.layer_window(layer) or stop
    grown = max(0, min(stop, window) - start)  # queries that still see everything before them
    pairs = grown * start + grown * (grown + 1) / 2 + (stop - start - grown) * window
    return 4 * spec.heads * spec.head_dim * pairs
