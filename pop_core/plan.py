"""What a run leaves out. A plan is frozen, validated data that belongs to one run, never to the model."""

import math
from dataclasses import MISSING, asdict, dataclass, fields
from decimal import Decimal

from .errors import PopError

OWN, FITTED = "own", "fitted"
CANDIDATES, NONE, ALL = RESCORES = ("candidates", "none", "all")
SUM, L2, MAX, GRIFFIN = SCORES = ("sum", "l2", "max", "griffin")
SHORTGPT, WANDA_SP, FLAP = "shortgpt", "wanda-sp", "flap"
BASELINES = (SHORTGPT, WANDA_SP, FLAP, GRIFFIN)
WIDTH = 0.1  # of the band of candidates, as in the paper


@dataclass(frozen=True)
class PrefillCut:
    """Skip layers `cutoff .. L-1` for the prompt (Prefill-Only Pruning, arXiv 2602.03295, section 3).

    cutoff: layers kept for the prompt; `L` keeps all of them (dense), `L-1` is lossless.
    kv: where the skipped layers' keys and values come from: their `own` weights applied to the residual stream at
        the cutoff (the paper), or `fitted` projections (ours, see `kv_projection`).
    sinks: first prompt tokens that run through all layers (ours; the paper has 0).
    boundary: last prompt tokens that run through all layers. The paper has 1; 0 is an ablation that breaks the method.
    """

    cutoff: int
    kv: str = OWN
    sinks: int = 0
    boundary: int = 1

    def __post_init__(self):
        for name in ("cutoff", "sinks", "boundary"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        if self.cutoff < 1:
            raise PopError(f"The cutoff is {self.cutoff}; it must be at least 1, the number of layers kept.")
        if self.kv not in (OWN, FITTED):
            raise PopError(f"The projection is '{self.kv}'; it must be '{OWN}' or '{FITTED}'.")
        for name in ("sinks", "boundary"):
            if getattr(self, name) < 0:
                raise PopError(f"The number of {name} tokens is {getattr(self, name)}; it must not be negative.")


@dataclass(frozen=True)
class Budget:
    """How many of an FFN's channels are retained, candidates, and pruned; and how many candidates a token chooses."""

    retained: int
    candidates: int
    pruned: int
    chosen: int

    @property
    def kept(self) -> int:
        """Channels that contribute to each token."""
        return self.retained + self.chosen

    @property
    def sliced(self) -> int:
        """Channels whose gate and up products are computed."""
        return self.retained + self.candidates


@dataclass(frozen=True)
class ChannelPruning:
    """Leave out FFN channels while writing (Partition-guided Online Pruning, arXiv 2602.06822, section 3).

    ratio: share of each FFN's channels that contribute nothing to a token, 0 (dense) to 1. At the end of the prompt
        they are split by their score into retained, candidate and pruned ones.
    width: share of the channels that are candidates, half of them on either side of the threshold, so 0 to
        `2 * min(ratio, 1 - ratio)`.
    rescore: which channels each token scores again: the `candidates` (the paper), `none` (a fixed mask from the
        prompt) or `all` (no partition: nothing is saved but the zeros, the best that choosing online can do).
    score: how the column of `W_down` enters a channel's score: its `sum` of magnitudes (our reading of the paper), its
        `l2` norm or its `max`; or not at all, with tokens weighted alike (`griffin`, arXiv 2404.01365).
    """

    ratio: float
    width: float = WIDTH
    rescore: str = CANDIDATES
    score: str = SUM

    def __post_init__(self):
        for name, allowed in (("rescore", RESCORES), ("score", SCORES)):
            if getattr(self, name) not in allowed:
                shown = str(getattr(self, name))[:40]
                raise PopError(f"The {name} is '{shown}'; it must be one of {', '.join(allowed)}.")
        object.__setattr__(self, "ratio", share(self.ratio, "prune ratio"))
        object.__setattr__(self, "width", share(self.width, "candidate width"))
        most = round(2 * min(self.ratio, 1 - self.ratio), 12)  # 2 * (1 - 0.9) is 0.19999999999999996
        if self.ratio and self.rescore == CANDIDATES and self.width > most:
            raise PopError(
                f"The candidate width is {self.width:g}; at a prune ratio of {self.ratio:g} it must be 0 to {most:g}, "
                "because half of the band lies on either side of the threshold."
            )

    def budget(self, channels: int) -> Budget:
        """The exact numbers for an FFN of `channels` channels: `kept` is `round((1 - ratio) * channels)`."""
        kept = round((1 - self.ratio) * channels)
        if self.rescore == ALL:
            return Budget(0, channels, 0, kept)
        half = math.floor(self.width / 2 * channels + 0.5) if self.rescore == CANDIDATES and self.ratio else 0
        below, above = min(half, kept), min(half, channels - kept)
        return Budget(kept - below, below + above, channels - kept - above, below)


@dataclass(frozen=True)
class Baseline:
    """Another method at the same cost, to stand beside ours (`baselines.py` has the sources).

    name: one of `BASELINES`. ratio: of the FFN channels, as for `ChannelPruning`. ShortGPT drops whole layers, as many
    as hold the same number of weights.
    """

    name: str
    ratio: float

    def __post_init__(self):
        if self.name not in BASELINES:
            raise PopError(f"The baseline is '{str(self.name)[:40]}'; it must be one of {', '.join(BASELINES)}.")
        object.__setattr__(self, "ratio", share(self.ratio, "prune ratio"))


@dataclass(frozen=True)
class Plan:
    """What one run prunes: nothing (`Plan()`, the dense model), layers of the prefill, FFN channels of the decode, or
    both; or what a baseline prunes, which stands alone."""

    prefill: PrefillCut | None = None
    channels: ChannelPruning | None = None
    baseline: Baseline | None = None

    def __post_init__(self):
        if self.baseline and (self.prefill or self.channels):
            raise PopError("A baseline stands alone: it cannot be combined with a cutoff or with channel pruning.")

    @property
    def online(self) -> ChannelPruning | None:
        """How channels are chosen from the prompt, if they are. GRIFFIN is a fixed mask with a score of its own."""
        if self.baseline and self.baseline.name == GRIFFIN:
            chosen = ChannelPruning(self.baseline.ratio, 0, NONE, GRIFFIN)
        else:
            chosen = self.channels
        return chosen if chosen and chosen.ratio else None

    @property
    def static(self) -> Baseline | None:
        """The baseline whose channels, or layers, are left out whatever the prompt, in both stages."""
        baseline = self.baseline
        return baseline if baseline and baseline.name != GRIFFIN and baseline.ratio else None

    def check(self, layers: int) -> None:
        """Raise `PopError` when the plan does not fit a model of `layers` layers."""
        if self.prefill and self.prefill.cutoff > layers:
            raise PopError(f"The cutoff is {self.prefill.cutoff}; this model has {layers} layers, so 1 to {layers}.")

    def describe(self, layers: int) -> str:
        """The plan in one short phrase."""
        cut, parts = self.prefill, []
        if cut and cut.cutoff < layers:
            parts.append(
                f"prompt skips layers {cut.cutoff}-{layers - 1} ({layers - cut.cutoff} of {layers}), {cut.kv} K/V, "
                f"{cut.sinks} sinks, boundary {cut.boundary}"
            )
        if self.baseline and self.baseline.ratio:
            parts.append(f"{self.baseline.name} at ratio {self.baseline.ratio:g}")
        elif online := self.online:
            width = f", candidate width {online.width:g}" if online.rescore == CANDIDATES else ""
            rescored = {CANDIDATES: "candidates rescored", NONE: "fixed mask", ALL: "all rescored"}[online.rescore]
            parts.append(f"answer leaves out {online.ratio:.0%} of the FFN channels, {rescored}{width}")
        return "; ".join(parts) or "dense: nothing skipped"

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> "Plan":
        """The inverse of `to_dict`. Raises `PopError` for unknown or impossible entries."""
        parts = {"prefill": PrefillCut, "channels": ChannelPruning, "baseline": Baseline}
        if not isinstance(data, dict) or set(data) - set(parts):
            raise PopError(
                "A plan is an object with the entries 'prefill', 'channels' and 'baseline', or some of them."
            )
        return cls(**{name: _part(parts[name], name, entries) for name, entries in data.items() if entries is not None})


def _part(kind, name: str, entries):
    """One part of a plan from its entries. Raises `PopError`."""
    known = [field.name for field in fields(kind)]
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if not isinstance(entries, dict) or set(entries) - set(known) or set(needed) - set(entries):
        raise PopError(f"The entry '{name}' of a plan has the entries {', '.join(known)}.")
    return kind(**entries)


DENSE = Plan()
LIMIT = 2**63  # of any count or seed


def whole_number(value, name: str) -> int:
    """`value` as an int. Raises `PopError` for text, nan, infinities, fractions and what does not fit 64 bits."""
    shown = "empty" if value is None else repr(value)[:40]
    try:
        number = Decimal(str(value))  # exact for every int, float and numeral
    except (ArithmeticError, ValueError):
        number = Decimal("nan")
    if number.is_finite() and abs(number) >= LIMIT:
        raise PopError(f"The {name} is {shown}; it must be below 2^63.")
    if not number.is_finite() or number != int(number):
        raise PopError(f"The {name} is {shown}; it must be a whole number.")
    return int(number)


def share(value, name: str) -> float:
    """`value` as a float from 0 to 1. Raises `PopError` for anything else, nan included."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1:
        shown = "empty" if value is None else repr(value)[:40]
        raise PopError(f"The {name} is {shown}; it must be a number from 0 to 1.")
    return number
