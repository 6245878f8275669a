"""Importance as plain numbers: sums that no order changes, cutoffs that follow from them, nothing not finite."""

import math
import random
import subprocess
import sys

import pytest

from pop_core import importance
from pop_core.errors import PopError
from pop_core.importance import by_layer, depth_contrast, rank_correlation, ratios, recommend, skipped_share

KEYS = {"layer", "prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn", "prefill_se", "decode_se"}
BAD = [math.nan, math.inf, -math.inf]


def layers_of(prefill, decode=None) -> list[dict]:
    """Entries with the given totals, half of each from either branch."""
    decode = [1.0] * len(prefill) if decode is None else decode
    return [
        {"layer": at}
        | {f"prefill_{branch}": None if p is None else p / 2 for branch in importance.BRANCHES}
        | {f"decode_{branch}": None if d is None else d / 2 for branch in importance.BRANCHES}
        for at, (p, d) in enumerate(zip(prefill, decode, strict=True))
    ]


def random_gradients(samples: int, layers: int = 4, seed: int = 0) -> list:
    """From 1e-12 to 1e12, of either sign."""
    rng = random.Random(seed)
    return [
        [[rng.choice((-1, 1)) * 10 ** rng.uniform(-12, 12) for _ in range(2)] for _ in range(layers)]
        for _ in range(samples)
    ]


def test_by_layer_is_half_the_mean_square():
    prefill = [[[2.0, 4.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]]
    decode = [[[-1.0, 1.0], [3.0, 1.0]]] * 3
    first, last = by_layer(prefill, decode)
    assert set(first) == set(last) == KEYS and (first["layer"], last["layer"]) == (0, 1)
    assert first["prefill_attention"] == pytest.approx((2 + 8 + 0) / 3)
    assert first["prefill_ffn"] == pytest.approx((8 + 0 + 2) / 3)
    deviations = [total - 20 / 3 for total in (10, 8, 2)]
    assert first["prefill_se"] == pytest.approx(math.hypot(*deviations) / math.sqrt(2 * 3))
    assert (first["decode_attention"], first["decode_ffn"], first["decode_se"]) == (0.5, 0.5, 0)
    assert (last["prefill_attention"], last["prefill_ffn"], last["prefill_se"]) == (0, 0, 0)
    assert (last["decode_attention"], last["decode_ffn"]) == (4.5, 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_samples_changes_nothing(seed):
    pairs = list(zip(random_gradients(40, seed=seed), random_gradients(40, seed=seed + 100), strict=True))
    expected = by_layer(*zip(*pairs, strict=True))
    random.Random(seed).shuffle(pairs)
    assert by_layer(*zip(*pairs, strict=True)) == expected


@pytest.mark.parametrize("bad", BAD)
def test_a_number_that_is_not_finite_makes_its_own_cell_unknown_and_no_other(bad):
    prefill, decode = random_gradients(5, seed=1), random_gradients(5, seed=2)
    expected = by_layer(prefill, decode)
    prefill[3][2][1] = bad
    expected[2] |= {"prefill_ffn": None, "prefill_se": None}
    assert by_layer(prefill, decode) == expected


def test_an_overflow_is_unknown_too():
    assert by_layer([[[1e200, 1.0]]] * 2, [[[1.0, 1.0]]] * 2)[0]["prefill_attention"] is None


def test_one_sample_has_no_standard_error():
    (entry,) = by_layer([[[2.0, 0.0]]], [[[1.0, 1.0]]])
    assert entry["prefill_attention"] == 2 and entry["prefill_se"] is None and entry["decode_se"] is None


def test_the_share_falls_from_all_to_nothing():
    for seed in range(20):
        rng = random.Random(seed)
        shares = skipped_share(layers_of([10 ** rng.uniform(-12, 12) for _ in range(9)]))
        assert len(shares) == 10 and shares[0] == 1 and shares[-1] == 0
        assert shares == sorted(shares, reverse=True)


def test_known_recommendations():
    layers = layers_of([50.0, 30.0, 15.0, 4.0, 1.0, 0.0])
    for tolerance, cutoff in ((0, 5), (0.005, 5), (0.02, 4), (0.05, 3), (0.1, 3), (0.25, 2), (0.5, 1), (1, 1)):
        assert recommend(layers, tolerance) == cutoff
    assert recommend(layers_of([0.0, 0.0, 1.0]), 0) == 3  # the last layer matters: nothing may be skipped


@pytest.mark.parametrize("seed", range(5))
def test_more_tolerance_never_keeps_more_layers(seed):
    rng = random.Random(seed)
    layers = layers_of([rng.expovariate(1) for _ in range(11)] + [0.0])
    cutoffs = [recommend(layers, step / 50) for step in range(51)]
    assert cutoffs == sorted(cutoffs, reverse=True) and cutoffs[0] == 11 and cutoffs[-1] == 1
    for step, cutoff in enumerate(cutoffs):
        shares = skipped_share(layers)
        assert shares[cutoff] <= step / 50 and (cutoff == 1 or shares[cutoff - 1] > step / 50)


@pytest.mark.parametrize("prefill", [[1.0, None, 0.0], [0.0, 0.0, 0.0]])
def test_what_is_unknown_recommends_nothing(prefill):
    assert recommend(layers_of(prefill), 0.5) is None and skipped_share(layers_of(prefill)) is None


@pytest.mark.parametrize("tolerance", ["x", "0.1", math.nan, math.inf, -1, -1e-9, 2, True, None, [0.1]])
def test_a_tolerance_that_is_no_share_is_one_sentence(tolerance):
    with pytest.raises(PopError, match="must be a number from 0 to 1"):
        recommend(layers_of([1.0, 0.0]), tolerance)


def test_ratios_of_the_stages():
    assert ratios(layers_of([2.0, 0.0, 0.0, None, 1.0], [1.0, 3.0, 0.0, 1.0, None])) == [
        0.5,
        math.inf,
        None,
        None,
        None,
    ]


def test_depth_contrast_leaves_out_what_has_no_finite_ratio():
    prefill, decode = [1.0, 2.0, 4.0, 4.0, 1.0, 0.0], [1.0, 6.0, 1.0, 1.0, 8.0, 5.0]
    assert depth_contrast(layers_of(prefill, decode)) == pytest.approx(8 / 2)  # 8 and infinite over 1 and 3
    assert depth_contrast(layers_of([1.0, 1.0, 0.0])) is None  # nothing finite in the last third
    assert depth_contrast(layers_of([None, 1.0, 1.0])) is None
    assert depth_contrast(layers_of([1.0, 1.0, 1.0], [0.0, 1.0, 1.0])) is None


def test_rank_correlation_with_ties():
    """Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5)."""
    assert rank_correlation([1, 2, 2, 9], [10, 30, 20, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_rank_correlation_sees_only_the_order():
    values = [3.0, 0.0, 1e-9, 7.0, 1e9]
    for transform in (lambda x: x, lambda x: 5 * x + 2, lambda x: x**3, math.atan):
        assert rank_correlation(values, [transform(value) for value in values]) == pytest.approx(1)
        assert rank_correlation(values, [-transform(value) for value in values]) == pytest.approx(-1)


@pytest.mark.parametrize("other", [[1.0, 1.0, 1.0], [1.0, None, 2.0]])
def test_rank_correlation_with_nothing_to_rank_is_unknown(other):
    assert rank_correlation([1.0, 2.0, 3.0], other) is None and rank_correlation(other, [1.0, 2.0, 3.0]) is None
    assert rank_correlation([1.0], [2.0]) is None and rank_correlation([], []) is None


def test_recorded_results_can_be_shown_without_torch():
    code = "import sys, pop_core.importance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_is_too_large_to_add_is_unknown():
    entry = by_layer([[[1e154, 1e154]]] * 4, [[[1.0, 1.0]]] * 4)[0]
    assert entry["prefill_attention"] is None and entry["prefill_se"] is None and entry["decode_ffn"] == 0.5
    assert skipped_share([{"prefill_attention": 1e308, "prefill_ffn": 1e307}] * 3) is None
