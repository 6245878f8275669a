"""Writing: the full model, one token at a time, or several known tokens at once (teacher forcing).

On a CPU a step reads only the part of the cache that is filled. On a GPU it has static shapes and touches the host
only for the token, so that a CUDA graph can capture it (`StaticStep`).
"""

import torch

from .cache import KVCache
from .decoder import Decoder, Ffn, Positions, attend_to


def decode_step(
    decoder: Decoder, cache: KVCache, positions: Positions, tokens: torch.Tensor, ffn: Ffn | None = None
) -> torch.Tensor:
    """Append one token per row, `[B, 1]`, and return the logits of the next, `[B, vocab]`."""
    return extend(decoder, cache, positions, tokens, ffn)[:, 0]


def extend(
    decoder: Decoder, cache: KVCache, positions: Positions, tokens: torch.Tensor, ffn: Ffn | None = None
) -> torch.Tensor:
    """Append `T` known tokens per row, `[B, T]`, through all layers; logits after each, `[B, T, vocab]`.

    ffn: what takes the place of the layers' own FFNs.
    """
    start, count = cache.lengths[0], tokens.shape[1]
    rope = positions.span(start, start + count)
    attend = _OneQuery(decoder, cache, positions) if count == 1 else _ManyQueries(decoder, cache, positions, count)
    h = decoder.embed(tokens)
    for i in range(decoder.spec.layers):
        h = decoder.block(i, h, rope, attend, ffn=ffn)
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


class StaticStep:
    """`decode_step` with shapes that never change: the whole cache is read, and a mask hides what is not filled.

    One object serves one run. `capture` turns the step into a CUDA graph; without it the same operations run eagerly.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, positions: Positions, batch: int = 1, ffn: Ffn | None = None):
        self.decoder, self.cache, self.positions, self.ffn = decoder, cache, positions, ffn
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=decoder.devices[0])
        self.slot = torch.zeros(1, dtype=torch.long, device=decoder.devices[0])
        self.graph = self.logits = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row, `[B, 1]`; the logits of the next, `[B, vocab]`, valid until the next call."""
        length = self.cache.lengths[0]
        self.cache.check(length)
        self.cache.require_room(length + 1)
        self.token.copy_(tokens)
        self.slot.fill_(length)
        if self.graph is None:
            self.logits = self._forward()
        else:
            self.graph.replay()
        self.cache.lengths = [length + 1] * len(self.cache.lengths)
        return self.logits

    def capture(self) -> None:
        """Record the step as a CUDA graph (one device, no offloading); what it writes, the next call writes again."""
        self.slot.fill_(self.cache.lengths[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: libraries allocate their workspaces outside the graph
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward()

    def _forward(self) -> torch.Tensor:
        decoder = self.decoder
        masks = {window: self._mask(i) for i, window in enumerate(self.cache.windows)}

        def attend(i, q, k, v):
            keys, values = self.cache.keys[i], self.cache.values[i]
            index = self.slot.to(k.device) % self.cache.room(i)
            keys.index_copy_(2, index, k)
            values.index_copy_(2, index, v)
            return attend_to(decoder.spec, q, keys, values, masks[self.cache.windows[i]])

        rope, h = self.positions.take(self.slot[None]), decoder.embed(self.token)
        for i in range(decoder.spec.layers):
            h = decoder.block(i, h, rope, attend, ffn=self.ffn)
        return decoder.head(h)[:, 0]

    def _mask(self, layer: int) -> torch.Tensor:
        """Which entries of the layer's room hold a token that the current one sees, `[B or 1, 1, 1, room]`."""
        room = self.cache.room(layer)
        index = torch.arange(room, device=self.slot.device)
        seen = index <= self.slot
        if self.positions.pad is None:
            return seen[None, None, None]
        slots = index + (self.slot - index) // room * room
        return (seen & (slots >= self.positions.pad[:, None]))[:, None, None]
