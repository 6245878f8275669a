"""Keys and values of the skipped layers, projected from the residual stream at the cutoff.

`own` (arXiv 2602.03295, section 3): each layer's own weights applied to its own norm of `h_c`. All skipped layers share
`x = h_c / rms(h_c)`, so with each norm's gain folded into the weights they are one large matrix product. `fitted`
(ours, `kv_fit.py`) is a matrix of the same shape with better numbers in it, so it costs nothing at run time.

Projections give keys before key norm and rotation, as `k_proj` does; what follows is per layer and done here.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from .decoder import Decoder, Rope, rotate

# A skipped layer to its keys and values for every prompt token, each [B, kv_heads, N, D]
KeysValues = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
# (decoder, residual stream at the cutoff [B, N, hidden], rope tables of the prompt) -> KeysValues
Projection = Callable[[Decoder, torch.Tensor, Rope], KeysValues]


class FusedProjection:
    """One product for all layers from `cutoff` up.

    weight: `[(L - cutoff) * 2 * kv_width, hidden]`, per layer the rows of K, then those of V. bias: the same rows, or
    None. Both act on `x = h / rms(h)`.
    """

    def __init__(self, cutoff: int, weight: torch.Tensor, bias: torch.Tensor | None):
        self.cutoff, self.weight, self.bias = cutoff, weight, bias

    def __call__(self, decoder: Decoder, h: torch.Tensor, rope: Rope) -> KeysValues:
        x = unit_rms(h, decoder.spec.rms_eps).to(self.weight.device, self.weight.dtype)
        parts = linear(x, self.weight, self.bias).split(decoder.spec.kv_width, dim=-1)

        def keys_values(i: int):
            at = 2 * (i - self.cutoff)
            return finish(decoder, i, parts[at], parts[at + 1], rope)

        return keys_values


class ModuleProjection:
    """The own projections by calling each layer's modules: for packed or offloaded weights, which cannot be read."""

    def __call__(self, decoder: Decoder, h: torch.Tensor, rope: Rope) -> KeysValues:
        def keys_values(i: int):
            layer = decoder.layers[i]
            x = layer.input_layernorm(h.to(decoder.devices[i]))
            return finish(decoder, i, layer.self_attn.k_proj(x), layer.self_attn.v_proj(x), rope)

        return keys_values


def finish(decoder: Decoder, i: int, keys: torch.Tensor, values: torch.Tensor, rope: Rope):
    """From `k_proj`/`v_proj` outputs `[B, N, kv_width]` to what layer `i` attends to, `[B, kv_heads, N, D]`."""
    keys, values = (decoder.heads(part.to(decoder.devices[i])) for part in (keys, values))
    if decoder.spec.qk_norm:
        keys = decoder.normed(decoder.layers[i].self_attn.k_norm, keys)
    return rotate(keys.transpose(1, 2), decoder.rope_of(i, rope)), values.transpose(1, 2)


def own_projection(decoder: Decoder, cutoff: int) -> FusedProjection:
    """The own K/V weights of layers `cutoff .. L-1`, norm gains folded in. Reads weights."""
    folded = [folded_weight(decoder, i) for i in range(cutoff, decoder.spec.layers)]
    device = decoder.devices[cutoff - 1]
    weight = torch.cat([w.to(device) for w, _ in folded]).to(decoder.dtype)
    biases = [b for _, b in folded]
    bias = None if biases[0] is None else torch.cat([b.to(device) for b in biases]).to(decoder.dtype)
    return FusedProjection(cutoff, weight, bias)


def folded_weight(decoder: Decoder, i: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[W_k; W_v]` of layer `i` times its input norm's gain, float32 `[2 * kv_width, hidden]`, and the biases."""
    layer = decoder.layers[i]
    parts = layer.self_attn.k_proj, layer.self_attn.v_proj
    gain = decoder.spec.norm_offset + layer.input_layernorm.weight.float()
    weight = torch.cat([part.weight.float() for part in parts]) * gain
    bias = None if parts[0].bias is None else torch.cat([part.bias.float() for part in parts])
    return weight, bias


def unit_rms(h: torch.Tensor, eps: float) -> torch.Tensor:
    """`h / rms(h)` over the last dimension, in float32."""
    h = h.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
