"""The bundled calibration text, by kind: for fitting projections, for measuring importance, for the baselines."""

from pathlib import Path

from .text import bos_ids, encode_text

CALIBRATION = Path(__file__).parent.parent / "assets" / "calibration"
KINDS = ("code", "dialogue", "prose", "technical")
SEGMENT = 512  # tokens read at once
SHORTEST = 9  # of a kind's last segment


def read_kind(kind: str) -> str:
    """The text of one kind."""
    return (CALIBRATION / f"{kind}.txt").read_text(encoding="utf-8")


def read_all() -> str:
    """All kinds, one after the other."""
    return "\n\n".join(map(read_kind, KINDS))


def calibration_segments(tokenizer) -> list[list[int]]:
    """The text as segments of at most `SEGMENT` ids, each with BOS where the model has one."""
    bos, found = bos_ids(tokenizer), []
    for kind in KINDS:
        ids = encode_text(tokenizer, read_kind(kind))
        size = SEGMENT - len(bos)
        found += [bos + ids[at : at + size] for at in range(0, len(ids), size)]
    return [segment for segment in found if len(segment) >= SHORTEST]
