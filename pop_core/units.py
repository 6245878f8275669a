"""Numbers as people write them, and what they count."""

from datetime import datetime


def milliseconds(value: float | None) -> str:
    """Three figures, with a unit; seconds from ten thousand milliseconds on."""
    if value is None:
        return "not measured"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def times(value: float | None) -> str:
    """A speed-up."""
    return "n/a" if value is None else f"{value:.2f}×"


def count(number: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def date(iso: str) -> str:
    """A day as people write it."""
    moment = datetime.fromisoformat(iso)
    return f"{moment.day} {moment:%B %Y}"


def duration(seconds: float) -> str:
    """A time to wait, roughly."""
    if seconds < 90:
        return count(max(1, round(seconds)), "second")
    return count(round(seconds / 60), "minute")


def gigabytes(count: int) -> str:
    """An amount of memory, with a decimal where there is one to see."""
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e9:.3f} GB"


def small(value: float) -> str:
    """A divergence, in nats."""
    if not value:
        return "0"
    return "< 0.0001" if 0 < value < 1e-4 else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def percent(share: float) -> str:
    """A share in two figures, never rounded to all or nothing."""
    if share <= 0 or share >= 1:
        return f"{share:.0%}" if share <= 1 else "100%"
    if share < 0.0005:
        return "under 0.1%"
    if share < 0.0995:
        return f"{share * 100:.1f}".removesuffix(".0") + "%"
    return "over 99%" if share > 0.995 else f"{share:.0%}"
