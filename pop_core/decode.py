"""Writing: the full model, one token at a time, or several known tokens at once (teacher forcing)."""

import torch

from .cache import KVCache
from .decoder import Decoder, Positions, attend_to


def decode_step(decoder: Decoder, cache: KVCache, positions: Positions, tokens: torch.Tensor) -> torch.Tensor:
    """Append one token per row, `[B, 1]`, and return the logits of the next, `[B, vocab]`."""
    return extend(decoder, cache, positions, tokens)[:, 0]


def extend(decoder: Decoder, cache: KVCache, positions: Positions, tokens: torch.Tensor) -> torch.Tensor:
    """Append `T` known tokens per row, `[B, T]`, through all layers; logits after each, `[B, T, vocab]`."""
    start, count = cache.lengths[0], tokens.shape[1]
    rope = positions.span(start, start + count)
    attend = _OneQuery(decoder, cache, positions) if count == 1 else _ManyQueries(decoder, cache, positions, count)
    h = decoder.embed(tokens)
    for i in range(decoder.spec.layers):
        h = decoder.block(i, h, rope, attend)
    cache.check(start + count)
    return decoder.head(h)


class _OneQuery:
    """The newest token sees all that its layer's cache holds, so only padding needs a mask."""

    def __init__(self, decoder: Decoder, cache: KVCache, positions: Positions):
        self.spec, self.cache, self.pad = decoder.spec, cache, positions.pad
        self.masks = {}

    def __call__(self, i, q, k, v):
        self.cache.append(i, k, v)
        keys, values = self.cache.view(i)
        return attend_to(self.spec, q, keys, values, self._mask(i))

    def _mask(self, i):
        if self.pad is None:
            return None
        window = self.cache.windows[i]
        if window not in self.masks:
            self.masks[window] = self.cache.slots(i)[None, None, None, :] >= self.pad[:, None, None, None]
        return self.masks[window]


class _ManyQueries:
    """Each new token sees what the cache held before and the new ones up to itself, inside its window."""

    def __init__(self, decoder: Decoder, cache: KVCache, positions: Positions, count: int):
        self.spec, self.cache, self.positions, self.count = decoder.spec, cache, positions, count
        self.masks = {}

    def __call__(self, i, q, k, v):
        held, held_values = self.cache.view(i)
        keys, values = torch.cat((held, k), dim=2), torch.cat((held_values, v), dim=2)
        mask = self._mask(i)
        self.cache.append(i, k, v)
        return attend_to(self.spec, q, keys, values, mask)

    def _mask(self, i):
        window = self.cache.windows[i]
        if window not in self.masks:
            new = torch.arange(
                self.cache.lengths[i], self.cache.lengths[i] + self.count, device=self.cache.keys[i].device
            )
            self.masks[window] = self.positions.mask(new[None], torch.cat((self.cache.slots(i), new)), window)
        return self.masks[window]
