"""The bundled calibration text, by kind: for fitting projections and for measuring importance."""

from pathlib import Path

CALIBRATION = Path(__file__).parent.parent / "assets" / "calibration"
KINDS = ("code", "dialogue", "prose", "technical")


def read_kind(kind: str) -> str:
    """The text of one kind."""
    return (CALIBRATION / f"{kind}.txt").read_text(encoding="utf-8")


def read_all() -> str:
    """All kinds, one after the other."""
    return "\n\n".join(map(read_kind, KINDS))
