"""Reading the prompt in a single, stage-aware pass (Prefill-Only Pruning, arXiv 2602.03295, section 3).

All tokens go through the kept layers. Then, layer by layer, the skipped layers get keys and values for every token
from a projection of the residual stream at the cutoff, and only the sinks and the boundary tokens run them. This equals
the paper's two passes (prune all but the last token, then decode it) and reads the kept layers' weights once.
"""

from collections.abc import Callable

import torch

from .cache import KVCache
from .decoder import Decoder, Ffn, Positions, attend_to
from .kv_projection import Projection
from .plan import PrefillCut
from .sight import Sight
from .stopping import Checkpoint, carry_on

# which of the tokens that a layer will see count, [B, T] or None for all, to the FFN that they pass
ReadingFfn = Callable[[torch.Tensor | None], Ffn]


def prefill(
    decoder: Decoder,
    cache: KVCache,
    positions: Positions,
    ids: torch.Tensor,
    cut: PrefillCut | None = None,
    project: Projection | None = None,
    checkpoint: Checkpoint = carry_on,
    reading: ReadingFfn | None = None,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Fill `cache` with the prompt and return the logits of its last token, `[B, vocab]`.

    ids: `[B, N]`, left-padded as `positions` says. cut: None, or a cutoff of `L` or more, is dense. project: keys and
    values of the layers from the cutoff up. checkpoint: called before each layer; may raise to abandon the run.
    reading: what takes the place of the FFNs, padding and repeated tokens not counted. sight: the prompt's pictures;
    all of their features must join below the cutoff (`engine.check`).
    """
    length, layers = ids.shape[1], decoder.spec.layers
    full = None
    if cut and cut.cutoff < layers:
        full = full_slots(length, cut, positions, ids.device)
    cutoff = layers if full is None else cut.cutoff

    h = decoder.embed(ids, sight)
    rope = positions.span(0, length)
    attend = PromptAttention(decoder, cache, positions, length)
    ffn = reading and reading(positions.real(torch.arange(length, device=ids.device)[None]))
    for i in range(cutoff):
        checkpoint()
        h = decoder.block(i, h, rope, attend, ffn=ffn, sight=sight)
    last = h[:, -1:]

    if full is not None:
        attend = _LegAttention(decoder, cache, positions, full, length, project(decoder, h, rope))
        h = h.take_along_dim(full[..., None].to(h.device), dim=1)
        rope = positions.take(full)
        ffn = reading and reading(_first_times(full, positions))
        for i in range(cutoff, layers):
            checkpoint()
            h = decoder.block(i, h, rope, attend, ffn=ffn)
        if cut.boundary:  # without a boundary, an ablation, the first token is written from the cutoff
            last = h[:, -1:]

    cache.check(length)
    return decoder.head(last)[:, 0]


def full_slots(length: int, cut: PrefillCut, positions: Positions, device) -> torch.Tensor | None:
    """Slots `[B or 1, R]`, ascending, of the tokens that run every layer; None when those are all tokens.

    Sinks are each row's first real tokens, the boundary its last. In a batch a short row may name a slot twice, which
    computes the same thing twice and changes nothing.
    """
    if cut.sinks + cut.boundary >= length:
        return None
    first = torch.arange(cut.sinks, device=device)[None]
    last = torch.arange(length - cut.boundary, length, device=device)[None]
    if positions.pad is not None:
        pad = positions.pad[:, None]
        first, last = (first + pad).clamp(max=length - 1), last.maximum(pad)
    return torch.cat((first, last), dim=1)


def _first_times(full: torch.Tensor, positions: Positions) -> torch.Tensor | None:
    """Which entries of `full_slots` name a slot for the first time in their row, or None for all of them."""
    if positions.pad is None:
        return None
    again = (full[:, :, None] == full[:, None, :]).tril(-1).any(-1)
    return ~again


class CausalAttention:
    """Every token attends to those before it; nothing is kept."""

    def __init__(self, decoder: Decoder, positions: Positions, length: int):
        self.spec = decoder.spec
        self.windows = [decoder.spec.layer_window(i) for i in range(decoder.spec.layers)]
        slots = torch.arange(length, device=decoder.devices[0])
        # a plain causal mask needs no tensor and lets the attention kernel skip half of the work
        self.masks = {
            window: positions.mask(slots[None], slots, window)
            for window in set(self.windows)
            if positions.pad is not None or positions.blocks is not None or length > (window or length)
        }

    def __call__(self, i, q, k, v):
        mask = self.masks.get(self.windows[i])
        return attend_to(self.spec, q, k, v, mask, causal=mask is None)


class PromptAttention(CausalAttention):
    """The same, and keys and values go to the cache."""

    def __init__(self, decoder: Decoder, cache: KVCache, positions: Positions, length: int):
        super().__init__(decoder, positions, length)
        self.cache = cache

    def __call__(self, i, q, k, v):
        self.cache.append(i, k, v)
        return super().__call__(i, q, k, v)


class _LegAttention:
    """Only the full tokens attend, to projected keys and values with their own written over them."""

    def __init__(self, decoder: Decoder, cache: KVCache, positions: Positions, full, length: int, projected):
        self.spec, self.cache, self.full, self.projected = decoder.spec, cache, full, projected
        slots = torch.arange(length, device=full.device)
        self.masks = {window: positions.mask(full, slots, window) for window in set(cache.windows)}

    def __call__(self, i, q, k, v):
        keys, values = self.projected(i)
        index = self.full.to(k.device)[:, None, :, None].expand_as(k)
        keys, values = keys.scatter(2, index, k), values.scatter(2, index, v)
        self.cache.append(i, keys, values)
        return attend_to(self.spec, q, keys, values, self.masks[self.cache.windows[i]])
