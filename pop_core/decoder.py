"""Our own loop over a loaded model's modules: embedding, block (attention, FFN), head.

The loop calls modules, so that quantised and offloaded layers work. Only where all weights are ordinary ones on a CPU,
`linear` and `normed` compute the same in a faster way; and experts, which are no modules, run on their weights. What
differs between the stages is an argument of `Decoder.block`: `attend` (which keys a query sees, where keys are stored)
and `ffn` (which channels run); the stages are in `prefill.py` and `decode.py`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation

from . import experts
from .families import FULL, SLIDING, DecoderSpec
from .ffn import FfnWeights, See, of_module
from .sight import Sight
from .weights import offloaded, packed

# (layer, queries [B, heads, T, D], keys and values [B, kv_heads, T, D]) -> [B, heads, T, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# layer type -> cos and sin, each [B, 1, T, D]
Rope = dict[str, tuple[torch.Tensor, torch.Tensor]]
# (layer, normalised input [B, T, hidden]) -> [B, T, hidden]
Ffn = Callable[[int, torch.Tensor], torch.Tensor]


class Decoder:
    """The loop over one model. Holds no state of any run; several runs may use it at once."""

    def __init__(self, model, spec: DecoderSpec):
        body = model.get_decoder()
        self.spec = spec
        self.embed_tokens, self.layers, self.norm, self.rotary = (
            body.embed_tokens,
            body.layers,
            body.norm,
            body.rotary_emb,
        )
        self.lm_head = model.lm_head
        self.devices = [_device_of(layer) for layer in self.layers]
        self.norm_device, self.head_device = _device_of(self.norm), _device_of(self.lm_head)
        self.one_device = len({*self.devices, self.norm_device, self.head_device}) == 1
        self.plain = _plain_on_cpu(model)
        self.readable = not packed(self.layers) and not offloaded(self.layers)
        self.ffns = [_ffns_of(layer.mlp) for layer in self.layers] if self.readable else None
        # the levels of DeepStack that join the residual stream before the first layer, and after each layer
        self.levels = [[], *([i] if i < spec.deepstack else [] for i in range(spec.layers))]
        self.row_blocks = 2 * torch.get_num_threads()
        self.dtype = self.norm.weight.dtype

    def embed(self, ids: torch.Tensor, sight: Sight | None = None) -> torch.Tensor:
        """Token ids `[B, T]` to the residual stream `[B, T, hidden]`; with `sight`, pictures where it has them."""
        h = self.embed_tokens(ids)
        return h if sight is None else sight.deepen(sight.placed(h), self.levels[0])

    def keeping(self, kept: list[int]) -> "Decoder":
        """The same decoder with the layers `kept` alone, over the same modules."""
        fewer, spec = copy.copy(self), self.spec
        fewer.layers = [self.layers[i] for i in kept]
        fewer.devices = [self.devices[i] for i in kept]
        fewer.ffns = [self.ffns[i] for i in kept] if self.ffns else None
        ends = zip([-1, *kept], [*kept, self.spec.layers], strict=True)  # a layer that goes takes no level with it
        fewer.levels = [list(chain(*self.levels[at + 1 : until + 1])) for at, until in ends]
        fewer.spec = replace(
            spec,
            layers=len(kept),
            layer_types=tuple(spec.layer_types[i] for i in kept),
            sparse=tuple(at for at, i in enumerate(kept) if i in spec.sparse),
        )
        return fewer

    def block(
        self,
        i: int,
        h: torch.Tensor,
        rope: Rope,
        attend: Attend,
        gates: torch.Tensor | None = None,
        ffn: Ffn | None = None,
        sight: Sight | None = None,
    ) -> torch.Tensor:
        """One layer on the residual stream `[B, T, hidden]`.

        gates: `[2, B, T]` factors of the attention and of the FFN branch, by token (virtual gates, `gates.py`).
        ffn: what takes the place of the layer's own FFN (`channels.py`). sight: the pictures of a prompt that is all in
        this residual stream; DeepStack adds more of them after the first layers.
        """
        layer, post_norms = self.layers[i], self.spec.post_norms
        h = self.on_device(i, h)
        branch = self.attention(i, self.normed(layer.input_layernorm, h), rope, attend)
        if post_norms:
            branch = self.normed(layer.post_attention_layernorm, branch)
        # in place where it is free: the branch is a buffer that nobody else has
        h = (branch if gates is None else gated(branch, gates[0])).add_(h)
        before_ffn = layer.pre_feedforward_layernorm if post_norms else layer.post_attention_layernorm
        branch = (ffn or self.ffn)(i, self.normed(before_ffn, h))
        if post_norms:
            branch = self.normed(layer.post_feedforward_layernorm, branch)
        h = (branch if gates is None else gated(branch, gates[1])).add_(h)
        return h if sight is None else sight.deepen(h, self.levels[i + 1])

    def attention(self, i: int, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """The attention branch on normalised input `[B, T, hidden]`."""
        part = self.layers[i].self_attn
        q, k, v = (self.heads(self.linear(proj, x)) for proj in (part.q_proj, part.k_proj, part.v_proj))
        if self.spec.qk_norm:
            q, k = self.normed(part.q_norm, q), self.normed(part.k_norm, k)
        turn = self.rope_of(i, rope)
        mixed = attend(i, rotate(q.transpose(1, 2), turn), rotate(k.transpose(1, 2), turn), v.transpose(1, 2))
        return self.linear(part.o_proj, mixed.transpose(1, 2).flatten(2))

    def ffn(self, i: int, x: torch.Tensor, see: See | None = None) -> torch.Tensor:
        """The feed-forward branch on normalised input `[B, T, hidden]`. see: is shown the channels' activations."""
        part = self.layers[i].mlp
        if i not in self.spec.sparse:
            hidden = self.joined(part.act_fn, self.linear(part.gate_proj, x), self.linear(part.up_proj, x))
            if see:
                see(i, 0, None, hidden.flatten(0, -2))
            return self.linear(part.down_proj, hidden)
        if not self.readable:
            return part(x)

        def expert(e: int, tokens: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
            return self.gated_ffn(self.ffns[i][e], states, partial(see, i, e, tokens) if see else None)

        return experts.mixed(part, x, expert)

    def gated_ffn(self, weights: FfnWeights, x: torch.Tensor, touch=None) -> torch.Tensor:
        """An FFN by its weights. touch: is given the activations `[..., channels]`, to look at or change in place."""
        ins = [self.product(*pair, x) for pair in zip(weights.ins, weights.in_biases or (None, None), strict=False)]
        hidden = self.joined(weights.activation, *(ins if len(ins) == 2 else ins[0].chunk(2, dim=-1)))
        if touch:
            touch(hidden)
        return self.product(weights.down, weights.down_bias, hidden)

    def joined(self, activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The channels' activations, from the products of gate and up."""
        gate = self.activated(activation, gate)
        # in place like the activation: a new buffer of 4 * ffn bytes a token costs more than the product
        return gate * up if gate.requires_grad else gate.mul_(up)

    def head(self, h: torch.Tensor) -> torch.Tensor:
        """The residual stream `[B, T, hidden]` to logits `[B, T, vocab]`."""
        if not self.one_device:
            h = h.to(self.norm_device)
        h = self.normed(self.norm, h)
        logits = self.linear(self.lm_head, h if self.one_device else h.to(self.head_device))
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def activated(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` for the FFN's activation; SiLU in place, except when autograd needs the old values."""
        if isinstance(module, SiLUActivation) and not x.requires_grad:
            return silu(x, inplace=True)
        return module(x)

    def normed(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` for an RMS norm; on a CPU with fewer operations, of which a single token needs but three."""
        if not self.plain:
            return module(x)
        offset, eps = self.spec.norm_offset, self.spec.rms_eps
        gain = offset + module.weight if offset else module.weight
        if one_token(x) and not x.requires_grad:
            flat = x.reshape(-1)
            return (x * gain).mul_((torch.dot(flat, flat).item() / len(flat) + eps) ** -0.5)
        return rms_norm(x, x.shape[-1:], gain, eps)

    def linear(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)`; on a CPU, for a single token, by `product`."""
        if self.plain and one_token(x):
            return self.product(module.weight, module.bias, x)
        return module(x)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """`x W^T + b`; on a CPU, for a single token, with the rows of the weight shared out to the threads.

        BLAS runs a matrix-vector product on one thread, which leaves most of the memory bandwidth unused. As a batch
        of row blocks, still a view of the same weight, a whole decode step takes half the time (README).
        """
        rows = weight.shape[0] // self.row_blocks
        if not self.plain or not one_token(x) or rows * self.row_blocks != weight.shape[0]:
            return linear(x, weight, bias)
        blocks = weight.view(self.row_blocks, rows, weight.shape[1])
        # a transposed row, not a column: bmm picks its kernel by the strides, and the other one is four times slower
        column = x.as_strided((self.row_blocks, weight.shape[1], 1), (0, 1, weight.shape[1]))
        out = torch.bmm(blocks, column).view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, n * head_dim]` to `[B, T, n, head_dim]`."""
        return x.view(*x.shape[:-1], x.shape[-1] // self.spec.head_dim, self.spec.head_dim)

    def rope_of(self, i: int, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin for layer `i`, on its device."""
        cos, sin = rope[self.spec.layer_types[i]]
        return self.on_device(i, cos), self.on_device(i, sin)

    def on_device(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """A tensor where layer `i` is: layers of one model may live on several devices."""
        return x if self.one_device else x.to(self.devices[i])


@dataclass
class Positions:
    """Where the tokens of one run stand: rope tables by slot, and the left padding of each row.

    `tables`: layer type -> cos and sin `[B or 1, capacity, D]`. `pad`: `[B]` slots to the left of each row's first
    token, or None when no row has any. `blocks`: `[capacity]` the picture of each slot, or -1, where the tokens of a
    picture see each other both ways; else None.
    """

    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    pad: torch.Tensor | None = None
    blocks: torch.Tensor | None = None

    @classmethod
    def build(
        cls, decoder: Decoder, capacity: int, device, pad: torch.Tensor | None = None, sight: Sight | None = None
    ) -> "Positions":
        """Tables for slots `0 .. capacity-1` from the model's own rotary module. sight: of a prompt without padding."""
        if pad is not None and not pad.any():
            pad = None
        slots = torch.arange(capacity, device=device)[None]
        positions = slots if pad is None else (slots - pad[:, None]).clamp(min=0)
        if sight is not None:
            positions = sight.positions_of(slots)
        blocks = sight.blocks(capacity) if sight is not None and decoder.spec.image_blocks else None
        like = torch.empty(0, device=device, dtype=decoder.dtype)
        if decoder.spec.rope_by_type:
            kinds = set(decoder.spec.layer_types)
            return cls({kind: decoder.rotary(like, positions, kind) for kind in kinds}, pad, blocks)
        table = decoder.rotary(like, positions)
        return cls({FULL: table, SLIDING: table}, pad, blocks)

    def span(self, start: int, stop: int) -> Rope:
        """The tables of slots `start .. stop-1`."""
        return {kind: tuple(t[:, None, start:stop] for t in pair) for kind, pair in self.tables.items()}

    def take(self, slots: torch.Tensor) -> Rope:
        """The tables of the given slots, `[B or 1, R]`."""
        index = slots[..., None]
        return {kind: tuple(t.take_along_dim(index, 1)[:, None] for t in pair) for kind, pair in self.tables.items()}

    def real(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Which slots `[B or 1, T]` hold a token and not padding, `[B, T]`; None for all."""
        return None if self.pad is None else slots >= self.pad[:, None]

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """Which keys each query sees: bool `[B or 1, 1, Q, K]` from slots `[B or 1, Q]` and `[K]`.

        A query in the padding sees itself, so that no row of the softmax is empty; nothing ever looks at it.
        """
        q, k = queries[:, None, :, None], keys[None, None, None, :]
        seen = k <= q
        if self.blocks is not None:
            mine, theirs = self.blocks[q], self.blocks[k]
            seen = seen | (mine == theirs) & (mine >= 0)
        if window is not None:
            seen = seen & (k > q - window)
        if self.pad is not None:
            seen = seen & (k >= self.pad[:, None, None, None]) | (k == q)
        return seen


def one_token(x: torch.Tensor) -> bool:
    """Whether `[..., channels]` is a single vector."""
    return x.shape[:-1].numel() == 1


def gated(branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A branch `[B, T, hidden]` times its gate `[B, T]`, in the precision of the gate and so of its gradient."""
    return (branch * gate[..., None].to(branch.device)).to(branch.dtype)


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of `[B, n, T, D]` by cos and sin `[B, 1, T, D]` (halves, as in Llama)."""
    (cos, sin), half = turn, x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned


def attend_to(spec: DecoderSpec, q, k, v, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
    """Softmax attention with grouped queries; `[B, heads, Q, D]` over `[B, kv_heads, K, D]`."""
    mask = mask if mask is None else mask.to(q.device)
    if q.shape[2] == 1 and not causal:  # heads that share keys are queries of one head: a quarter less time
        grouped = q.view(q.shape[0], spec.kv_heads, -1, q.shape[3])
        return scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.softmax_scale).view_as(q)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=spec.softmax_scale, enable_gqa=spec.heads != spec.kv_heads
    )


def _device_of(module) -> torch.device:
    """Where a module computes; offloaded modules keep their weights elsewhere and say so in accelerate's hook."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    return next(module.parameters()).device


def _ffns_of(part) -> list[FfnWeights]:
    """The weights of each FFN of a layer: its one, or its experts and then the shared one."""
    return experts.weights_of(part) if hasattr(part, "experts") else [of_module(part)]


def _plain_on_cpu(model) -> bool:
    """Whether every layer is an ordinary one in CPU memory, in float32 or float64, with nothing hooked to it."""
    linears = [part for part in model.modules() if hasattr(part, "out_features")]
    return (
        all(type(part) is torch.nn.Linear for part in linears)
        and not any(hasattr(part, "_hf_hook") for part in model.modules())
        and all(
            parameter.dtype in (torch.float32, torch.float64) and parameter.device.type == "cpu"
            for parameter in model.parameters()
        )
    )
