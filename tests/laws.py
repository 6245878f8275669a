"""What the law tests share: a decoder over a tiny model, and one way to run a prefill on it."""

import torch
from tiny import tiny_model

from pop_core.cache import KVCache
from pop_core.decode import decode_step
from pop_core.decoder import Decoder, Positions
from pop_core.families import read_spec
from pop_core.kv_projection import own_projection
from pop_core.prefill import prefill

ROOM = 40  # slots for what is written after the prompt


class Subject:
    """A tiny model and our decoder over it."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32):
        self.model = tiny_model(name).to(dtype)
        self.decoder = Decoder(self.model, read_spec(self.model.config))
        self.layers = self.decoder.spec.layers

    def read(self, ids, cut=None, pad=None, project=None, reading=None):
        """Logits after the prompt `[B, vocab]`, with the cache and positions to go on from."""
        decoder, capacity = self.decoder, ids.shape[1] + ROOM
        cache = KVCache(decoder.spec, len(ids), capacity, decoder.devices, decoder.dtype)
        positions = Positions.build(decoder, capacity, ids.device, pad)
        if project is None and cut is not None and cut.cutoff < self.layers:
            project = own_projection(decoder, cut.cutoff)
        return prefill(decoder, cache, positions, ids, cut, project, reading=reading), cache, positions

    def write(self, state, tokens, ffn=None):
        """Teacher-forced steps after `read`: the logits of the read and of each step, `[B, 1 + T, vocab]`."""
        logits, cache, positions = state
        steps = [decode_step(self.decoder, cache, positions, tokens[:, t : t + 1], ffn) for t in range(tokens.shape[1])]
        return torch.stack([logits, *steps], dim=1)

    def stock(self, ids):
        """The `transformers` forward: logits at every position, `[B, T, vocab]`."""
        return self.model(ids).logits


def gap(a, b) -> float:
    """The largest absolute difference."""
    return (a - b).abs().max().item()
