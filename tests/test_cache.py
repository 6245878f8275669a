"""The cache against what it stands for: a list of all slots, of which a sliding layer shows the last ones."""

import pytest
import torch
from laws import Subject
from tiny import WINDOW

from pop_core.cache import KVCache, cache_bytes


def make(capacity: int) -> KVCache:
    decoder = Subject("gemma3").decoder  # five sliding layers, one full
    return KVCache(decoder.spec, 2, capacity, decoder.devices, torch.float32)


@pytest.mark.parametrize("steps", [[1] * 20, [20], [WINDOW, 5, 7], [3, 17], [WINDOW - 1, 1, 1, 10]])
def test_a_layer_holds_the_last_window_of_what_was_written(steps):
    cache = make(sum(steps))
    numbers = torch.arange(sum(steps)).float()
    written = numbers[None, None, :, None].expand(2, 2, -1, 16)
    at = 0
    for count in steps:
        for layer in range(6):
            cache.append(layer, written[:, :, at : at + count], -written[:, :, at : at + count])
        at += count
        cache.check(at)
        for layer in range(6):
            slots, (keys, values) = cache.slots(layer), cache.view(layer)
            expected = numbers[:at][-WINDOW:] if layer < 5 else numbers[:at]
            assert torch.equal(slots.sort().values.float(), expected)
            assert torch.equal(keys[1, 1, :, 3], slots.float())
            assert torch.equal(values[0, 0, :, 0], -slots.float())


def test_more_than_the_capacity_is_refused():
    cache = make(4)
    with pytest.raises(IndexError, match="4 slots"):
        cache.append(0, torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16))


def test_a_layer_that_was_forgotten_is_noticed():
    cache = make(4)
    cache.append(0, torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16))
    with pytest.raises(RuntimeError, match="layer 1 holds 0 positions instead of 3"):
        cache.check(3)


def test_the_estimate_is_what_is_taken():
    cache = make(20)
    spec = Subject("gemma3").decoder.spec
    taken = sum(t.nbytes for t in (*cache.keys, *cache.values))
    assert taken == cache_bytes(spec, 2, 20, torch.float32)
    assert cache.room(0) == WINDOW and cache.room(5) == 20
