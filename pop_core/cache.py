"""The keys and values of one run, preallocated, with full and sliding-window layers.

A *slot* is a place in the padded sequence: slot `j` of row `b` holds the token at position `j - pad[b]`. A full layer
stores slot `j` at index `j`. A sliding layer has room for one window and stores slot `j` at `j % window`: attention
does not mind the order of keys, and what is overwritten has just left the window.
"""

import torch

from .families import DecoderSpec


class KVCache:
    """Keys and values `[B, kv_heads, room, head_dim]` per layer, for up to `capacity` slots.

    `devices[i]` is where layer `i` runs. `lengths[i]` counts the slots that layer `i` has seen.
    """

    def __init__(self, spec: DecoderSpec, batch: int, capacity: int, devices: list, dtype: torch.dtype):
        self.capacity = capacity
        self.windows = [spec.layer_window(i) for i in range(spec.layers)]
        self.lengths = [0] * spec.layers
        self.keys, self.values = [], []
        for window, device in zip(self.windows, devices, strict=True):
            room = min(window or capacity, capacity)
            shape = (batch, spec.kv_heads, room, spec.head_dim)
            # zeros, not empty: a static step multiplies unwritten values by an attention weight of exactly 0
            self.keys.append(torch.zeros(shape, device=device, dtype=dtype))
            self.values.append(torch.zeros(shape, device=device, dtype=dtype))

    def room(self, layer: int) -> int:
        return self.keys[layer].shape[2]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the next `T` slots, `[B, kv_heads, T, head_dim]`; a sliding layer keeps the last window of them."""
        start, room = self.lengths[layer], self.room(layer)
        stop = start + keys.shape[2]
        self.require_room(stop)
        self.lengths[layer] = stop
        start = max(start, stop - room)
        keys, values = keys[:, :, start - stop :], values[:, :, start - stop :]
        for first, last in _runs(start, stop, room):
            into = slice(first % room, first % room + last - first)
            self.keys[layer][:, :, into] = keys[:, :, first - start : last - start]
            self.values[layer][:, :, into] = values[:, :, first - start : last - start]

    def require_room(self, length: int) -> None:
        """Raise `IndexError` when `length` slots are more than were allocated."""
        if length > self.capacity:
            raise IndexError(f"slot {length - 1} written to a cache of {self.capacity} slots")

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values still held, `[B, kv_heads, min(length, room), head_dim]`, in storage order."""
        held = min(self.lengths[layer], self.room(layer))
        return self.keys[layer][:, :, :held], self.values[layer][:, :, :held]

    def slots(self, layer: int) -> torch.Tensor:
        """The slot of each entry of `view`, `[min(length, room)]`."""
        length, room = self.lengths[layer], self.room(layer)
        index = torch.arange(min(length, room), device=self.keys[layer].device)
        return index + (length - 1 - index) // room * room

    def check(self, length: int) -> None:
        """The law of the house: every layer has seen exactly `length` slots. Raises `RuntimeError` otherwise."""
        wrong = [i for i, seen in enumerate(self.lengths) if seen != length]
        if wrong:
            raise RuntimeError(f"layer {wrong[0]} holds {self.lengths[wrong[0]]} positions instead of {length}")


def cache_bytes(spec: DecoderSpec, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """What a `KVCache` of this size takes, in bytes."""
    rooms = sum(min(spec.layer_window(i) or capacity, capacity) for i in range(spec.layers))
    return 2 * batch * rooms * spec.kv_width * dtype.itemsize


def _runs(start: int, stop: int, room: int):
    """`[start, stop)` cut where `slot % room` wraps."""
    while start < stop:
        last = min(stop, (start // room + 1) * room)
        yield start, last
        start = last
