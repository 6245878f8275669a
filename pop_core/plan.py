"""What a run leaves out. A plan is frozen, validated data that belongs to one run, never to the model."""

from dataclasses import asdict, dataclass
from decimal import Decimal

from .errors import PopError

OWN, FITTED = "own", "fitted"


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
class Plan:
    """What one run prunes: nothing (`Plan()`, the dense model) or layers of the prefill."""

    prefill: PrefillCut | None = None

    def check(self, layers: int) -> None:
        """Raise `PopError` when the plan does not fit a model of `layers` layers."""
        if self.prefill and self.prefill.cutoff > layers:
            raise PopError(f"The cutoff is {self.prefill.cutoff}; this model has {layers} layers, so 1 to {layers}.")

    def describe(self, layers: int) -> str:
        """The plan in one short phrase."""
        cut = self.prefill
        if cut is None or cut.cutoff >= layers:
            return "dense: nothing skipped"
        return (
            f"prompt skips layers {cut.cutoff}-{layers - 1} ({layers - cut.cutoff} of {layers}), {cut.kv} K/V, "
            f"{cut.sinks} sinks, boundary {cut.boundary}"
        )

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> "Plan":
        """The inverse of `to_dict`. Raises `PopError` for unknown or impossible entries."""
        if not isinstance(data, dict) or set(data) - {"prefill"}:
            raise PopError("A plan is an object with the entry 'prefill', or an empty one.")
        cut = data.get("prefill")
        if cut is None:
            return cls()
        if not isinstance(cut, dict) or "cutoff" not in cut or set(cut) - {"cutoff", "kv", "sinks", "boundary"}:
            raise PopError("A prefill cut has the entries 'cutoff', 'kv', 'sinks' and 'boundary'.")
        return cls(PrefillCut(**cut))


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
