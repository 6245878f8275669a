"""Writing a token equals the stock forward however it is done: step, chunk, static shapes; in every family."""

import pytest
import torch
from laws import gap
from tiny import WINDOW, random_ids

from pop_core.decode import StaticStep, extend
from pop_core.plan import PrefillCut

TOLERANCE = 1e-4


@pytest.mark.parametrize("length", [1, WINDOW - 1, 3 * WINDOW])
@pytest.mark.parametrize("counts", [[5], [1, 4, 1, WINDOW + 2]])
def test_known_tokens_at_once_equal_the_stock_forward(subject, length, counts):
    ids, more = random_ids(length), random_ids(sum(counts), seed=2)
    _, cache, positions = subject.read(ids)
    chunks = [extend(subject.decoder, cache, positions, part) for part in more.split(counts, dim=1)]
    assert gap(torch.cat(chunks, 1), subject.stock(torch.cat((ids, more), 1))[:, length:]) < TOLERANCE


@pytest.mark.parametrize("cut", [None, PrefillCut(3, sinks=1, boundary=2)])
@pytest.mark.parametrize("pads", [[0, 0], [0, 9], [9, 17]])
def test_the_static_step_equals_the_plain_one(subject, cut, pads):
    ids, more, pad = random_ids(18, batch=2), random_ids(12, batch=2, seed=2), torch.tensor(pads)
    plain = subject.write(subject.read(ids, cut, pad), more)
    first, cache, positions = subject.read(ids, cut, pad)
    step = StaticStep(subject.decoder, cache, positions, batch=2)
    static = torch.stack([first, *(step(more[:, t : t + 1]).clone() for t in range(12))], dim=1)
    assert gap(static, plain) < TOLERANCE
    assert cache.lengths == [30] * subject.layers


def test_the_static_step_refuses_what_has_no_room(subject):
    _, cache, positions = subject.read(random_ids(3))
    step, token = StaticStep(subject.decoder, cache, positions), random_ids(1)
    for _ in range(cache.capacity - 3):
        step(token)
    with pytest.raises(IndexError):
        step(token)
