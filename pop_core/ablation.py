"""The truth that gates are held against: really leave out a layer, in one stage alone, and see what changes.

A dense forward of prompt and continuation keeps what enters every layer, and its keys and values. To leave out layer
`l` for the prompt alone is to go on from layer `l + 1` with the prompt's residual stream as it entered `l`; its keys
and values in `l` stay, as they do when pruning. To leave it out while writing is the same for the boundary token and
those after it, which go on alone over the prompt's keys and values. All variants travel through the layers as one
batch, which grows by one at every layer.

The same states give ShortGPT's block influence (arXiv 2403.03853: one minus the cosine of a layer's input and output)
by stage, and `cut_divergence`: what each cutoff really costs.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity

from .decoder import Decoder, Positions, Rope, attend_to
from .divergence import divergence, mean
from .kv_projection import KeysValues, ModuleProjection
from .prefill import CausalAttention
from .sight import Sight
from .stopping import Checkpoint, carry_on


@dataclass(frozen=True)
class Ablation:
    """One sample, by layer. prefill_kl, decode_kl: KL(dense || without the layer in that stage), nats per token of the
    continuation. prefill_influence, decode_influence: block influence on the tokens of that stage."""

    prefill_kl: list[float]
    decode_kl: list[float]
    prefill_influence: list[float]
    decode_influence: list[float]


@torch.inference_mode()
def ablate(
    decoder: Decoder, ids: torch.Tensor, boundary: int, checkpoint: Checkpoint = carry_on, sight: Sight | None = None
) -> Ablation:
    """Leave out each layer in turn. ids `[1, T]`, boundary and sight as for `gates.gate_gradients`.

    What DeepStack adds after a layer stays when the layer goes.
    """
    dense = _Dense(decoder, ids, boundary, sight)
    reads, writes = [], []
    for i, (before, after) in enumerate(zip(dense.states, dense.states[1:], strict=False)):
        after = after.to(before.device)
        without = before if sight is None else sight.deepen(before, decoder.levels[i + 1])
        reads.append(torch.cat((without[:, :boundary], after[:, boundary:]), dim=1))
        writes.append(before[:, boundary:])
    read = _travel(decoder, reads, 1, lambda i, n: dense.attend, dense.rope(0), checkpoint, sight=sight)
    write = _travel(decoder, writes, 1, lambda i, n: _Tail(dense, dense.keys_values), dense.rope(boundary), checkpoint)
    return Ablation(dense.divergences(read), dense.divergences(write), *dense.influence())


@torch.inference_mode()
def cut_divergence(
    decoder: Decoder,
    ids: torch.Tensor,
    boundary: int,
    lowest: int,
    checkpoint: Checkpoint = carry_on,
    sight: Sight | None = None,
) -> list[float]:
    """KL(dense || cut) in nats per token of the continuation, for the cutoffs `lowest .. L-1`.

    The prompt skips every layer from the cutoff up, with own projections, no sinks and a boundary of 1, exactly as
    `prefill` does it; only the continuation has to run again.
    """
    dense = _Dense(decoder, ids, boundary, sight)
    states = dense.states[lowest : decoder.spec.layers]
    prompt_rope = dense.rope(0, boundary)

    def attend(i: int, count: int) -> _Tail:
        prompts = torch.cat([state[:, :boundary].to(decoder.devices[i]) for state in states[:count]])
        return _Tail(dense, ModuleProjection()(decoder, prompts, prompt_rope))

    starts = [state[:, boundary:] for state in states]
    return dense.divergences(_travel(decoder, starts, 0, attend, dense.rope(boundary), checkpoint, lowest))


def _travel(
    decoder, starts, delay: int, attend, rope: Rope, checkpoint, first: int = 0, sight: Sight | None = None
) -> list[torch.Tensor]:
    """Each start `[1, T, hidden]`, the `n`-th of which enters layer `first + n + delay`, to its residual stream after
    the last layer. attend: (layer, how many variants travel) to the attention of that layer."""
    travelling = None
    for i in range(first, decoder.spec.layers):
        count = min(len(starts), i - first + 1 - delay)
        if not count:
            continue
        checkpoint()
        h = starts[count - 1].to(decoder.devices[i])
        if travelling is not None:
            h = torch.cat((travelling.to(h.device), h))
        travelling = decoder.block(i, h, rope, attend(i, count), sight=sight)
    finished = [] if travelling is None else list(travelling.split(1))
    return finished + starts[len(finished) :]  # the last layer left out: nothing is left to run


class _Dense:
    """A dense forward that keeps what entered and left each layer, and its keys and values."""

    def __init__(self, decoder: Decoder, ids: torch.Tensor, boundary: int, sight: Sight | None = None):
        self.decoder, self.length, self.boundary = decoder, ids.shape[1], boundary
        self.positions = Positions.build(decoder, self.length, ids.device, sight=sight)
        self.attend = CausalAttention(decoder, self.positions, self.length)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.states = [decoder.embed(ids, sight)]
        for i in range(decoder.spec.layers):
            self.states.append(decoder.block(i, self.states[-1], self.rope(0), self._keep, sight=sight))
        self.logits = decoder.head(self.states[-1][:, boundary:])[0]

    def _keep(self, i, q, k, v):
        self._kept.append((k[:, :, : self.boundary], v[:, :, : self.boundary]))
        return self.attend(i, q, k, v)

    def keys_values(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt's, without the boundary token's."""
        return self._kept[i]

    def rope(self, start: int, stop: int | None = None) -> Rope:
        return self.positions.span(start, self.length if stop is None else stop)

    def divergences(self, finished: list[torch.Tensor]) -> list[float]:
        """KL of each variant's predictions of the continuation, from its last residual stream `[1, T, hidden]`."""
        count = len(self.logits)
        return [mean(divergence(self.logits, self.decoder.head(h[:, -count:])[0])[0]) for h in finished]

    def influence(self) -> tuple[list[float], list[float]]:
        """Block influence of each layer on the prompt's tokens, and on the others."""
        change = [
            1 - cosine_similarity(before[0].float(), after[0].to(before.device).float(), dim=-1)
            for before, after in zip(self.states, self.states[1:], strict=False)
        ]
        return [c[: self.boundary].mean().item() for c in change], [c[self.boundary :].mean().item() for c in change]


class _Tail:
    """The tokens from the boundary on attend to given keys and values of the prompt, and to their own."""

    def __init__(self, dense: _Dense, prompt: KeysValues):
        self.spec, self.windows, self.prompt = dense.decoder.spec, dense.attend.windows, prompt
        slots = torch.arange(dense.length, device=dense.decoder.devices[0])
        self.masks = {w: dense.positions.mask(slots[None, dense.boundary :], slots, w) for w in set(self.windows)}

    def __call__(self, i, q, k, v):
        keys, values = (part.expand(len(k), -1, -1, -1) for part in self.prompt(i))
        keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        return attend_to(self.spec, q, keys, values, self.masks[self.windows[i]])
