"""What an analysis of prompts with pictures found, in words: how deep each kind of token reads, and where a picture
matters. Takes `Importance.to_dict()` and returns plain text, nothing where there are no pictures."""

from .importance import KINDS, checked_tolerance, cutoffs_by_kind, skipped_share, total
from .picture_view import grids, has_pictures, layer_sums
from .units import count, percent

NAMES = {"image": "image tokens", "text": "text tokens"}
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")


def kinds_sentence(result: dict, tolerance: float) -> str:
    """How many layers image tokens and text tokens need, each by its own importance."""
    layers, tolerance = result["layers"], checked_tolerance(tolerance)
    cutoffs = cutoffs_by_kind(layers, tolerance)
    if not cutoffs:
        return ""
    known = [kind for kind in KINDS if cutoffs[kind] is not None]
    said = [f"The layers that {NAMES[k]} need are not known: {_why(layers, k)}." for k in KINDS if k not in known]
    if known:
        need = " and ".join(f"{NAMES[kind]} need {_first(cutoffs[kind], len(layers))}" for kind in known)
        left = " and ".join(percent(skipped_share(layers, kind)[cutoffs[kind]]) for kind in known)
        said.insert(
            0,
            f"{need[0].upper()}{need[1:]}: the layers above carry {left} of their reading importance, within the "
            f"tolerance of {percent(tolerance)}.",
        )
    return " ".join(said)


def _first(cutoff: int, layers: int) -> str:
    if cutoff >= layers:
        return f"all {count(layers, 'layer')}"
    return "only the first layer" if cutoff == 1 else f"the first {cutoff} layers"


def _why(layers: list[dict], kind: str) -> str:
    if any(total(entry, kind) is None for entry in layers):
        return "a value is not a finite number"
    if any(total(entry, kind) for entry in layers):
        return "the values are too large to be added up"
    return "every value is exactly 0"


def overlay_sentence(result: dict, layer: int) -> str:
    """Under the overlay: which part of the picture matters most in a layer, and how this layer compares to others."""
    if not has_pictures(result):
        return ""
    sums, pictures = layer_sums(result), grids(result)[layer]
    if sums[layer] is None:
        return f"Some values of layer {layer} are not finite numbers, so nothing is added up here."
    if not sums[layer]:
        return f"In layer {layer} every image token's importance is exactly 0.{_last(layer, len(sums))}"
    value, picture, row, column = max(
        (value, -picture, -row, -column)
        for picture, grid in enumerate(pictures)
        for row, line in enumerate(grid)
        for column, value in enumerate(line)
    )
    picture, row, column = -picture, -row, -column
    grid = pictures[picture]
    which = "the picture" if len(pictures) == 1 else f"picture {picture + 1}"
    where = place_words(row, column, len(grid), len(grid[0]))
    every = sum(len(line) for grid in pictures for line in grid)
    said = f"In layer {layer} the part of {which} that matters most is {where} (row {row + 1}, column {column + 1})"
    said += f": this token carries {percent(value / sums[layer])} of the layer's image importance"
    said += f", where an even share would be {percent(1 / every)}." if every > 1 else "."
    return f"{said} {_compared(sums, layer)} This is one sample and one draw of labels; another may look different."


def _last(layer: int, layers: int) -> str:
    if layer < layers - 1:
        return ""
    return " Later tokens see only the keys and values of the last layer, which are made before it does its work."


def _compared(sums: list[float | None], layer: int) -> str:
    """How a layer's image importance compares with that of the others."""
    if None in sums or len(sums) < 2:
        return "How it compares with other layers is not known." if None in sums else ""
    rank = sum(other > sums[layer] for other in sums) + 1
    whole = percent(sums[layer] / sum(sums))
    if rank == 1:
        return f"No layer matters more to the image tokens: {whole} of what they matter in all layers."
    top = max(range(len(sums)), key=sums.__getitem__)
    share = f"The layer carries {whole} of what they matter in all layers"
    return f"{share}, number {rank} of {len(sums)}; layer {top} carries most."


def place_words(row: int, column: int, rows: int, columns: int) -> str:
    """A cell of a grid as a person would say it, by thirds: "at the top right", "in the middle"."""
    down, across = ROWS[min(2, 3 * row // rows)], COLUMNS[min(2, 3 * column // columns)]
    if rows < 3:
        down = "" if rows == 1 else ("top", "bottom")[row]
    if columns < 3:
        across = "" if columns == 1 else ("left", "right")[column]
    return f"at the {' '.join(filter(None, (down, across)))}" if down or across else "in the middle"
