"""The image tokens of an analysis's first sample as grids of numbers. Takes `Importance.to_dict()`."""

import math

from .token_findings import token_totals

Grid = list[list[float | None]]  # rows from the top, columns from the left


def has_pictures(result: dict) -> bool:
    """Whether there is a picture to lay the map over: recorded results of before have none."""
    return bool(result.get("pictures")) and bool(result["token_map"].get("pictures"))


def grids(result: dict) -> list[list[Grid]]:
    """`[layers][pictures]`: the importance of each image token, None where it is not finite."""
    shown = result["token_map"]
    return [[_grid(row, place) for place in shown["pictures"]] for row in token_totals(shown)]


def _grid(row: list, place: dict) -> Grid:
    start, columns = place["start"], place["columns"]
    return [row[start + at * columns : start + (at + 1) * columns] for at in range(place["rows"])]


def layer_sums(result: dict) -> list[float | None]:
    """The importance of all image tokens of the sample, by layer; None where one is not finite."""
    sums = []
    for pictures in grids(result):
        values = [value for grid in pictures for row in grid for value in row]
        sums.append(None if None in values else math.fsum(values))
    return sums


def heaviest_layer(result: dict) -> int:
    """The layer in which the image tokens matter most."""
    sums = layer_sums(result)
    return max(range(len(sums)), key=lambda layer: sums[layer] or 0.0)
