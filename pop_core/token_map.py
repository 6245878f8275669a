"""Importance by token and layer of one sample, as plain data, and where its pictures' tokens are."""

import math

from . import importance
from .gates import GateGradients
from .samples import Sample

MAP_TOKENS = 512  # the last ones of the sample, or all of one with pictures


def token_map(gates: GateGradients, sample: Sample, tokenizer) -> dict:
    """`1/2 g^2` of one draw of labels, `[layers][T]` for each branch.

    pieces: the text of each token. first: the index in the sample of the first one shown. boundary: the index among
    those shown from which on they count as decode. pictures: `{start, rows, columns}` of each, start among those shown;
    only where there are pictures.
    """
    first = 0 if sample.prompt else max(0, gates.by_token.shape[-1] - MAP_TOKENS)
    values = gates.by_token[..., first:].square() / 2
    return {
        "pieces": [tokenizer.decode([token]) for token in sample.ids[first:-1]],
        "first": first,
        "boundary": max(0, sample.boundary - first),
        **{
            branch: [[_three_figures(value) for value in row] for row in values[:, at].tolist()]
            for at, branch in enumerate(importance.BRANCHES)
        },
        **({"pictures": _places(gates, sample)} if sample.prompt else {}),
    }


def _places(gates: GateGradients, sample: Sample) -> list[dict]:
    places, at = [], 0
    for fact in sample.prompt.pixels.facts:
        places.append({"start": gates.seen[at], "rows": fact["rows"], "columns": fact["columns"]})
        at += fact["tokens"]
    return places


def _three_figures(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
