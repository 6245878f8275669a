"""Meaning, on the embedded real model: what choosing channels online is worth. Fetches the model on its first run."""

import os
from pathlib import Path

import pytest

from pop_core import quality
from pop_core.engine import Engine
from pop_core.errors import HubOffline
from pop_core.loading import load_model
from pop_core.plan import ChannelPruning, Plan
from pop_core.samples import text_samples

TEXT = Path(__file__).parent.parent / "assets" / "heldout" / "technical.txt"
PROMPT, NEW, SEGMENTS = 192, 48, 2


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        return Engine(load_model("smollm2"))
    except HubOffline as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_the_more_a_token_may_choose_the_better(engine):
    """KL(all) < KL(candidates, wider) < KL(candidates 0.1) < KL(none), at every ratio, and more at higher ones."""
    samples = text_samples(engine, TEXT.read_text(encoding="utf-8"), PROMPT, NEW, SEGMENTS, spread=False)
    ratios = (0.2, 0.4, 0.6)
    plans = [
        Plan(channels=pruning)
        for ratio in ratios
        for pruning in (
            ChannelPruning(ratio, rescore="all"),
            ChannelPruning(ratio, 0.3),
            ChannelPruning(ratio, 0.1),
            ChannelPruning(ratio, rescore="none"),
        )
    ]
    measured = iter(quality.measure(engine, samples, plans))
    rows = [[next(measured).kl for _ in range(4)] for _ in ratios]
    assert all(row == sorted(row) and len(set(row)) == 4 for row in rows)
    assert all(list(column) == sorted(column) for column in zip(*rows, strict=True))
