"""The layer x token map in words, and what each of its tokens is called."""

import math
import unicodedata

from .importance import BRANCHES
from .units import percent

LONGEST_PIECE = 12  # characters of a token that are shown
MARKS = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥"}


def tokens_sentence(result: dict) -> str:
    """Under the token map: which prompt token weighs most, and whether the deep layers look at the writing ones."""
    shown = result["token_map"]
    values, boundary, pieces = token_totals(shown), shown["boundary"], shown["pieces"]
    caution = "This is one sample and one draw of labels; another may look different."
    if not pieces or not values:
        return "The map is empty."
    if any(value is None for row in values for value in row):
        return f"Some values of the map are not finite numbers, so nothing is added up here. {caution}"
    said = []
    columns = [math.fsum(column) for column in zip(*values, strict=True)]
    if any(columns[:boundary]):
        top = max(range(min(boundary, len(columns))), key=columns.__getitem__)
        layer = max(range(len(values)), key=lambda at: values[at][top])
        said.append(f"Of the prompt's tokens {_named(shown, top)} weighs most, most of all in layer {layer}.")
    elif boundary:
        said.append("No token of the prompt but the last has any importance in this map.")
    deep = values[-max(1, len(values) // 3) :]
    whole = math.fsum(map(math.fsum, deep))
    if whole and boundary:
        share = math.fsum(math.fsum(row[boundary:]) for row in deep) / whole
        where = "In the last third of the layers" if len(values) > 2 else "In the last layer"
        said.append(f"{where} {percent(share)} of the map's sum lies in the last prompt token and the written ones.")
    return " ".join([*said, caution])


def _named(shown: dict, at: int) -> str:
    """A token of the map in a sentence."""
    number = shown["first"] + at + 1
    if place := place_in_picture(shown, at):
        picture, row, column = place
        which = f"picture {picture}" if len(shown["pictures"]) > 1 else "the picture"
        return f"the image token in row {row}, column {column} of {which}, number {number},"
    return f"“{visible(shown['pieces'][at])}”, number {number},"


def place_in_picture(shown: dict, at: int) -> tuple[int, int, int] | None:
    """(picture, row, column) of a token of the map, each from 1; None for text."""
    for picture, place in enumerate(shown.get("pictures", ()), start=1):
        row, column = divmod(at - place["start"], place["columns"])
        if 0 <= row < place["rows"]:
            return picture, row + 1, column + 1
    return None


def labels(shown: dict) -> list[str]:
    """What to write under each token of the map. Not escaped."""
    places = [place_in_picture(shown, at) for at in range(len(shown["pieces"]))]
    return [
        f"▦ {place[1]},{place[2]}" if place else visible(piece)
        for place, piece in zip(places, shown["pieces"], strict=True)
    ]


def token_totals(shown: dict) -> list[list[float | None]]:
    """Attention plus FFN of a token map, `[layers][tokens]`, None where a part or the sum is not finite."""
    both = zip(*(shown[branch] for branch in BRANCHES), strict=True)
    return [[_together(*pair) for pair in zip(*rows, strict=True)] for rows in both]


def _together(attention: float | None, ffn: float | None) -> float | None:
    if attention is None or ffn is None:
        return None
    return attention + ffn if math.isfinite(attention + ffn) else None


def visible(piece: str) -> str:
    """A token as a label: blanks and controls made visible, at most 12 characters. Not escaped."""
    clear = "".join(MARKS.get(c) or ("▯" if unicodedata.category(c)[0] in "CZ" else c) for c in piece)
    return (clear if len(clear) <= LONGEST_PIECE else clear[: LONGEST_PIECE - 1] + "…") or "∅"
