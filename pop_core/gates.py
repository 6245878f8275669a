"""Virtual gates: how much each branch of each layer matters to reading, and to writing (arXiv 2602.03295, section 3).

Every residual branch of every layer is multiplied by a gate `g = 1`, one for each token: `h + g * branch(h)`. Removing
the branch moves `g` to 0, and the second-order term of what that does to the loss, with the Hessian replaced by the
Fisher information, is `I = 1/2 E[(dLoss/dg)^2]`. The Fisher information wants labels drawn from the model's own
predictions, not the text's own next tokens.

A gate shared by all tokens of a stage has the sum of their gradients as its own. So one forward and one backward pass
with a gate a token (ours) give both stages and the layer x token map at once. The boundary token, the last of the
prompt, counts as decode: it writes the first token, and runs every layer when pruning.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recomputed

from .decoder import Decoder, Positions
from .errors import NotEnoughMemory, PopError
from .families import DecoderSpec
from .prefill import CausalAttention

ATTENTION, FFN = 0, 1  # the branches, in the order of a gate tensor's second dimension


@dataclass(frozen=True)
class GateGradients:
    """`dLoss/dg` of one sample. by_token: `[layers, 2, T]` float64 on the CPU. loss: mean over the labels, in nats."""

    by_token: torch.Tensor
    boundary: int
    loss: float

    @property
    def prefill(self) -> torch.Tensor:
        """The gradients of the gates that all prompt tokens before the boundary share, `[layers, 2]`."""
        return self.by_token[..., : self.boundary].sum(-1)

    @property
    def decode(self) -> torch.Tensor:
        """The same for the boundary token and those after it."""
        return self.by_token[..., self.boundary :].sum(-1)


def gate_gradients(
    decoder: Decoder, ids: torch.Tensor, boundary: int, generator: torch.Generator, recompute: bool = False
) -> GateGradients:
    """One forward and one backward pass.

    ids: `[1, T]`, prompt and continuation but its last token, which predicts nothing that counts. boundary: index of
    the last prompt token; labels are drawn by `generator` from the predictions at `boundary .. T-1`. recompute: keep
    only the residual stream between layers and compute each layer again on the way back. The loss and the gates are in
    float32, or in the model's precision if that is higher. Raises `PopError` for predictions that are not finite, and
    `NotEnoughMemory`.
    """
    exhausted = False
    try:
        # inference tensors cannot take part in a backward pass, so none is made here, whatever the caller is in
        with torch.inference_mode(False), torch.enable_grad():
            gates = ones(decoder, ids.shape[1]).requires_grad_()
            logits = gated_logits(decoder, ids.clone(), boundary, gates, recompute)[0].to(gates.dtype)
            labels = draw(logits.detach(), generator)
            loss = cross_entropy(logits, labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, gates)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        exhausted = True
    if exhausted:  # outside of the handler: the error's traceback holds every activation
        free_caches()
        raise NotEnoughMemory(
            f"Memory ran out in the analysis of {ids.shape[1]:,} tokens; use shorter samples. The model is unharmed."
        )
    return GateGradients(gradient.double().cpu(), boundary, loss.item() / len(labels))


def gated_logits(
    decoder: Decoder, ids: torch.Tensor, first: int, gates: torch.Tensor | None = None, recompute: bool = False
) -> torch.Tensor:
    """Logits of `[1, T]` from position `first` on, `[1, T - first, vocab]`, with gates `[layers, 2, T]` or none."""
    length, layers = ids.shape[1], decoder.spec.layers
    positions = Positions.build(decoder, length, ids.device)
    attend, rope = CausalAttention(decoder, positions, length), positions.span(0, length)
    h = decoder.embed(ids)
    for i, gate in enumerate([None] * layers if gates is None else gates[:, :, None].unbind()):
        if recompute:
            h = recomputed(decoder.block, i, h, rope, attend, gate, use_reentrant=False)
        else:
            h = decoder.block(i, h, rope, attend, gate)
    return decoder.head(h[:, first:])


def ones(decoder: Decoder, length: int) -> torch.Tensor:
    """A gate of 1 for each branch and token, `[layers, 2, T]`."""
    dtype = torch.promote_types(decoder.dtype, torch.float32)
    return torch.ones(decoder.spec.layers, 2, length, dtype=dtype, device=decoder.devices[0])


def draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A label for each row of `[C, vocab]` from the model's own distribution, `[C]`. Raises `PopError` for NaN."""
    if not logits.isfinite().all():
        raise PopError("The model produced numbers that are not finite, so no labels can be drawn from it.")
    drawn = torch.multinomial(logits.softmax(-1).to(generator.device), 1, generator=generator)
    return drawn[:, 0].to(logits.device)


def analysis_bytes(spec: DecoderSpec, tokens: int, labels: int, dtype: torch.dtype, recompute: bool) -> int:
    """What the backward pass of one sample of `tokens` tokens needs at its peak, in bytes, beside the model.

    Kept for each token and layer: the inputs of the norms, queries, keys, values and their mix, the gated branches and
    the three products of the FFN; with `recompute` only one residual stream a layer, and one layer of all that.
    """
    attention = 2 * (spec.heads + spec.kv_width // spec.head_dim) * spec.head_dim
    wide = 8 if spec.post_norms else 6  # tensors of the residual stream's width
    kept = wide * spec.hidden + attention + 4 * spec.ffn
    if spec.qk_norm:
        kept += 2 * (spec.heads + spec.kv_heads) * spec.head_dim
    per_token = spec.layers * spec.hidden + 2 * kept if recompute else (spec.layers + 1) * kept
    masks = tokens * tokens if spec.window and spec.window < tokens else 0
    return tokens * per_token * dtype.itemsize + 5 * labels * spec.vocab * 4 + 5 * masks


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def free_caches() -> None:
    """Give back what torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
