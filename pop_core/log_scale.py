"""Numbers on a log scale: the range to show, readable ticks, and values as text, where 0 and NaN are what they are."""

import math

DECADES = 6  # below the largest value; what is smaller looks the same, so that rounding errors cannot use up the scale
HIGHEST = 308.0  # of log10s; ten to more than that is no float
MOST_TICKS = 6


def log_range(values: list) -> tuple[float, float]:
    """log10 of the smallest and largest positive value, at least half a decade apart and at most `DECADES`."""
    known = [math.log10(value) for value in values if value and value > 0]
    if not known:
        return -1.0, 0.0
    low, high = max(min(known), max(known) - DECADES), max(known)
    pad = max(0.0, 0.5 - (high - low)) / 2
    return low - pad, min(high + pad, HIGHEST)


def ticks(low: float, high: float, most: int = MOST_TICKS) -> tuple[list[float], list[str]]:
    """Readable numbers between two log10s, as (log10s, texts): powers of ten, and 2 and 5 where there are few."""
    decades = [float(decade) for decade in range(math.floor(low), math.ceil(high) + 1)]
    candidates = [decade for decade in decades if low <= decade <= high]
    if len(candidates) < 3:
        candidates = [d + math.log10(digit) for d in decades for digit in (1, 2, 5)]
        candidates = [value for value in candidates if low <= value <= high]
    step = -(-len(candidates) // most) or 1
    chosen = candidates[::-step][::-1]
    return chosen, [_tick(10**value) for value in chosen]


def _tick(value: float) -> str:
    return f"{value:.0e}" if value < 5e-5 or value > 5e5 else f"{value:.4f}".rstrip("0").rstrip(".")


def figures(value: float | None) -> str:
    """Three significant figures, as text."""
    rounded = number(value)
    return f"{rounded:g}" if isinstance(rounded, float) else rounded


def number(value: float | None) -> float | str:
    """Three significant figures, as a number while it is one, so that a large map stays small."""
    if value is None:
        return "NaN"
    if math.isinf(value):
        return "∞"
    return float(f"{value:.3g}") if value else "0"
