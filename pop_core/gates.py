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
from .errors import PopError
from .prefill import CausalAttention
from .sight import Sight
from .stopping import Checkpoint, carry_on

ATTENTION, FFN = 0, 1  # the branches, in the order of a gate tensor's second dimension


@dataclass(frozen=True)
class GateGradients:
    """`dLoss/dg` of one sample. by_token: `[layers, 2, T]` float64 on the CPU. loss: mean over the labels, in nats.
    seen: the slots of the image tokens before the boundary."""

    by_token: torch.Tensor
    boundary: int
    loss: float
    seen: tuple[int, ...] = ()

    @property
    def prefill(self) -> torch.Tensor:
        """The gradients of the gates that all prompt tokens before the boundary share, `[layers, 2]`."""
        return self.by_token[..., : self.boundary].sum(-1)

    @property
    def image(self) -> torch.Tensor:
        """The same, shared by the image tokens among them."""
        return self.by_token[..., list(self.seen)].sum(-1)

    @property
    def text(self) -> torch.Tensor:
        """The same, shared by the others: with `image` it adds up to `prefill`."""
        others = sorted({*range(self.boundary)} - {*self.seen})
        return self.by_token[..., others].sum(-1)

    @property
    def decode(self) -> torch.Tensor:
        """The same of the boundary token and those after it."""
        return self.by_token[..., self.boundary :].sum(-1)


def gate_gradients(
    decoder: Decoder,
    ids: torch.Tensor,
    boundary: int,
    generator: torch.Generator,
    recompute: bool = False,
    checkpoint: Checkpoint = carry_on,
    sight: Sight | None = None,
) -> GateGradients:
    """One forward and one backward pass.

    ids: `[1, T]`, prompt and continuation but its last token, which predicts nothing that counts. boundary: index of
    the last prompt token; labels are drawn by `generator` from the predictions at `boundary .. T-1`. recompute: keep
    only the residual stream between layers and compute each layer again on the way back. The loss and the gates are in
    float32, or in the model's precision if that is higher. checkpoint: called at every layer, both ways; may raise to
    abandon the sample. sight: the prompt's pictures. Raises `PopError` for predictions that are not finite. Whoever
    calls this guards against memory that runs out (`memory.guarded`): only outside of it is the graph let go of.
    """
    # inference tensors cannot take part in a backward pass, so none is made here, whatever the caller is in
    with torch.inference_mode(False), torch.enable_grad():
        gates = ones(decoder, ids.shape[1]).requires_grad_()
        logits = gated_logits(decoder, ids.clone(), boundary, gates, recompute, checkpoint, sight)[0].to(gates.dtype)
        labels = draw(logits.detach(), generator)
        loss = cross_entropy(logits, labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, gates)
    seen = () if sight is None else tuple(slot for slot in sight.slots.tolist() if slot < boundary)
    return GateGradients(gradient.double().cpu(), boundary, loss.item() / len(labels), seen)


def gated_logits(
    decoder: Decoder,
    ids: torch.Tensor,
    first: int,
    gates: torch.Tensor | None = None,
    recompute: bool = False,
    checkpoint: Checkpoint = carry_on,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Logits of `[1, T]` from position `first` on, `[1, T - first, vocab]`, with gates `[layers, 2, T]` or none."""
    length, layers = ids.shape[1], decoder.spec.layers
    positions = Positions.build(decoder, length, ids.device, sight=sight)
    attend, rope = CausalAttention(decoder, positions, length), positions.span(0, length)
    h = decoder.embed(ids, sight)
    for i, gate in enumerate([None] * layers if gates is None else gates[:, :, None].unbind()):
        checkpoint()
        if recompute:
            h = recomputed(decoder.block, i, h, rope, attend, gate, sight=sight, use_reentrant=False)
        else:
            h = decoder.block(i, h, rope, attend, gate, sight=sight)
        if h.requires_grad:
            h.register_hook(lambda _: checkpoint())  # on the way back; it goes with the graph
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
