"""Our own loop over a loaded model's modules: embedding, block (attention, FFN), head.

The loop calls modules, so that quantised and offloaded layers work. Only where all weights are ordinary ones on a CPU,
`linear` and `normed` compute the same in a faster way. What differs between the
stages (which keys a query sees, where keys are stored) is the `attend` argument of `Decoder.block`; the stages are in
`prefill.py` and `decode.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation

from .families import FULL, SLIDING, DecoderSpec

# (layer, queries [B, heads, T, D], keys and values [B, kv_heads, T, D]) -> [B, heads, T, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# layer type -> cos and sin, each [B, 1, T, D]
Rope = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Decoder:
    """The loop over one model. Holds no state of any run; several runs may use it at once."""

    def __init__(self, model, spec: DecoderSpec):
        body = model.model
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
        self.plain = _plain_on_cpu(model)
        self.row_blocks = 2 * torch.get_num_threads()
        self.dtype = self.norm.weight.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[B, T]` to the residual stream `[B, T, hidden]`."""
        return self.embed_tokens(ids)

    def block(
        self, i: int, h: torch.Tensor, rope: Rope, attend: Attend, gates: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One layer on the residual stream `[B, T, hidden]`.

        gates: `[2, B, T]` factors of the attention and of the FFN branch, by token (virtual gates, `gates.py`).
        """
        layer, post_norms = self.layers[i], self.spec.post_norms
        h = h.to(self.devices[i])  # layers of one model may live on several devices
        branch = self.attention(i, self.normed(layer.input_layernorm, h), rope, attend)
        if post_norms:
            branch = self.normed(layer.post_attention_layernorm, branch)
        # in place where it is free: the branch is a buffer that nobody else has
        h = (branch if gates is None else gated(branch, gates[0])).add_(h)
        before_ffn = layer.pre_feedforward_layernorm if post_norms else layer.post_attention_layernorm
        branch = self.ffn(i, self.normed(before_ffn, h))
        if post_norms:
            branch = self.normed(layer.post_feedforward_layernorm, branch)
        return (branch if gates is None else gated(branch, gates[1])).add_(h)

    def attention(self, i: int, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """The attention branch on normalised input `[B, T, hidden]`."""
        part = self.layers[i].self_attn
        q, k, v = (self.heads(self.linear(proj, x)) for proj in (part.q_proj, part.k_proj, part.v_proj))
        if self.spec.qk_norm:
            q, k = self.normed(part.q_norm, q), self.normed(part.k_norm, k)
        turn = self.rope_of(i, rope)
        mixed = attend(i, rotate(q.transpose(1, 2), turn), rotate(k.transpose(1, 2), turn), v.transpose(1, 2))
        return self.linear(part.o_proj, mixed.transpose(1, 2).flatten(2))

    def ffn(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward branch on normalised input `[B, T, hidden]`."""
        part = self.layers[i].mlp
        gate, up = self.activated(part.act_fn, self.linear(part.gate_proj, x)), self.linear(part.up_proj, x)
        # in place like the activation: a new buffer of 4 * ffn bytes a token costs more than the product
        return self.linear(part.down_proj, gate * up if gate.requires_grad else gate.mul_(up))

    def head(self, h: torch.Tensor) -> torch.Tensor:
        """The residual stream `[B, T, hidden]` to logits `[B, T, vocab]`."""
        logits = self.linear(self.lm_head, self.normed(self.norm, h.to(self.norm_device)).to(self.head_device))
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def activated(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` for the FFN's activation; SiLU in place, except when autograd needs the old values."""
        if isinstance(module, SiLUActivation) and not x.requires_grad:
            return silu(x, inplace=True)
        return module(x)

    def normed(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` for an RMS norm; on a CPU one fused operation instead of six."""
        if not self.plain:
            return module(x)
        return rms_norm(x, x.shape[-1:], self.spec.norm_offset + module.weight, self.spec.rms_eps)

    def linear(self, module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)`; on a CPU, for a single token, with the rows of the weight shared out to the threads.

        BLAS runs a matrix-vector product on one thread, which leaves most of the memory bandwidth unused. As a batch
        of row blocks, still a view of the same weight, a whole decode step takes half the time (README).
        """
        rows = module.out_features // self.row_blocks
        if not self.plain or x.numel() != x.shape[-1] or rows * self.row_blocks != module.out_features:
            return module(x)
        blocks = module.weight.view(self.row_blocks, rows, -1)
        # a transposed row, not a column: bmm picks its kernel by the strides, and the other one is four times slower
        column = x.view(1, 1, -1).expand(self.row_blocks, -1, -1).transpose(1, 2)
        out = torch.bmm(blocks, column).view(*x.shape[:-1], -1)
        return out if module.bias is None else out + module.bias

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, n * head_dim]` to `[B, T, n, head_dim]`."""
        return x.unflatten(-1, (-1, self.spec.head_dim))

    def rope_of(self, i: int, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin for layer `i`, on its device."""
        cos, sin = rope[self.spec.layer_types[i]]
        return cos.to(self.devices[i]), sin.to(self.devices[i])


@dataclass
class Positions:
    """Where the tokens of one run stand: rope tables by slot, and the left padding of each row.

    `tables`: layer type -> cos and sin `[B or 1, capacity, D]`. `pad`: `[B]` slots to the left of each row's first
    token, or None when no row has any.
    """

    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    pad: torch.Tensor | None = None

    @classmethod
    def build(cls, decoder: Decoder, capacity: int, device, pad: torch.Tensor | None = None) -> "Positions":
        """Tables for slots `0 .. capacity-1` from the model's own rotary module."""
        if pad is not None and not pad.any():
            pad = None
        slots = torch.arange(capacity, device=device)[None]
        positions = slots if pad is None else (slots - pad[:, None]).clamp(min=0)
        like = torch.empty(0, device=device, dtype=decoder.dtype)
        if decoder.spec.rope_by_type:
            kinds = set(decoder.spec.layer_types)
            return cls({kind: decoder.rotary(like, positions, kind) for kind in kinds}, pad)
        table = decoder.rotary(like, positions)
        return cls({FULL: table, SLIDING: table}, pad)

    def span(self, start: int, stop: int) -> Rope:
        """The tables of slots `start .. stop-1`."""
        return {kind: tuple(t[:, None, start:stop] for t in pair) for kind, pair in self.tables.items()}

    def take(self, slots: torch.Tensor) -> Rope:
        """The tables of the given slots, `[B or 1, R]`."""
        index = slots[..., None]
        return {kind: tuple(t.take_along_dim(index, 1)[:, None] for t in pair) for kind, pair in self.tables.items()}

    def mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """Which keys each query sees: bool `[B or 1, 1, Q, K]` from slots `[B or 1, Q]` and `[K]`.

        A query in the padding sees itself, so that no row of the softmax is empty; nothing ever looks at it.
        """
        q, k = queries[:, None, :, None], keys[None, None, None, :]
        seen = k <= q
        if window is not None:
            seen = seen & (k > q - window)
        if self.pad is not None:
            seen = seen & (k >= self.pad[:, None, None, None]) | (k == q)
        return seen


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


def _plain_on_cpu(model) -> bool:
    """Whether every linear layer is an ordinary one in CPU memory, in float32 or float64, with nothing hooked to it."""
    linears = [part for part in model.modules() if hasattr(part, "out_features")]
    return all(
        type(part) is torch.nn.Linear
        and part.weight.dtype in (torch.float32, torch.float64)
        and part.weight.device.type == "cpu"
        and not hasattr(part, "_hf_hook")
        for part in linears
    )
