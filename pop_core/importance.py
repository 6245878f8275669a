"""Importance as plain data: what gate gradients add up to, the cutoff that follows from it, and rank correlations.

Imports no torch, so that a page shows recorded results at once. A value that is not finite is None, never a number.
"""

import math
from dataclasses import asdict, dataclass, field

from .errors import PopError

STAGES, BRANCHES = ("prefill", "decode"), ("attention", "ffn")
KINDS = ("image", "text")  # of the tokens that are read, where there are pictures
MOST_TOKENS = 4096  # of one sample: the backward pass keeps what every layer did with each of them
MOST_SAMPLES = 2000
TOLERANCE = 0.05  # share of the prefill importance that a recommended cutoff may skip


@dataclass(frozen=True)
class Importance:
    """What an analysis found. Importances are `1/2 E[g^2]` in nats of the whole continuation (arXiv 2602.03295).

    layers: one entry a layer, `{layer, prefill_attention, prefill_ffn, decode_attention, decode_ffn, prefill_se,
    decode_se}`, the standard errors those of attention plus FFN; with pictures also `image_*` and `text_*`, for gates
    that the image tokens and the text tokens of the prompt share. prompt_tokens, new_tokens: where samples have
    pictures, the mean, rounded. samples: how many of `requested` were done. loss: of
    the drawn labels, nats a token. seconds: without ablation. forward_equivalents: cost over plain forwards of the same
    tokens. cut_kl: `{cutoff, kl}` really measured with own projections on `cut_samples` of the samples, nats a token.
    predicted: `{cutoff, speedup}` of the prefill by arithmetic, at `predicted_tokens` prompt tokens. token_map:
    importance by token of the first sample (see `analysis.py`). ablation: what leaving out each layer really does, or
    None. spearman_*: of gates against ablation over the layers. complete: False when it was stopped, in the phase
    `stopped_in` ("gates", "cutoffs" or "ablation"). distinct: samples that differ in more than the labels drawn.

    Only with pictures: image_tokens: mean of a sample. pictures: of the first sample, as in `vision.Pixels.facts`.
    cutoffs_by_kind: see `cutoffs_by_kind`. lowest_cutoff: that prompts like these can have (DeepStack).
    """

    model: str
    text: str
    samples: int
    requested: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    layers: list[dict]
    depth_contrast: float | None
    recommended_cutoff: int | None
    tolerance: float
    cut_kl: list[dict]
    cut_samples: int
    predicted: list[dict]
    predicted_tokens: int
    token_map: dict
    ablation: dict | None
    spearman_prefill: float | None
    spearman_decode: float | None
    loss: float
    recompute: bool
    seconds: float
    forward_equivalents: float | None
    device: str
    dtype: str
    machine: str
    date: str
    versions: dict
    complete: bool
    stopped_in: str | None = None
    notices: list[str] = field(default_factory=list)
    image_tokens: float = 0.0
    pictures: list[dict] = field(default_factory=list)
    cutoffs_by_kind: dict | None = None
    lowest_cutoff: int = 1
    distinct: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


def by_layer(prefill: list[list], decode: list[list], **kinds: list[list]) -> list[dict]:
    """The `layers` of an `Importance` from gradients `[samples][layers][2]` of each stage; kinds: those of "image" and
    "text".

    Sums are exact before they are rounded, so the order of the samples changes nothing.
    """
    stages = {"prefill": prefill, "decode": decode} | kinds
    entries = []
    for layer in range(len(prefill[0])):
        entry = {"layer": layer}
        errors = {}
        for stage, gradients in stages.items():
            squares = [[g * g / 2 for g in sample[layer]] for sample in gradients]
            for branch, values in zip(BRANCHES, zip(*squares, strict=True), strict=True):
                entry[f"{stage}_{branch}"] = mean_and_error(values)[0]
            errors[f"{stage}_se"] = mean_and_error([sum(pair) for pair in squares])[1]
        entries.append(entry | errors)
    return entries


def mean_and_error(values) -> tuple[float | None, float | None]:
    """The mean and its standard error; None where they are not finite or, for the error, there is only one value."""
    count = len(values)
    try:
        mean = math.fsum(values) / count
        squares = math.fsum((value - mean) ** 2 for value in values)
    except (OverflowError, ValueError):  # of sums, and of inf - inf
        return None, None
    if not math.isfinite(mean):
        return None, None
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else None


def total(entry: dict, stage: str) -> float | None:
    """Attention plus FFN of a layer in a stage, or for "image" or "text", None where either is unknown."""
    parts = [entry[f"{stage}_{branch}"] for branch in BRANCHES]
    return None if None in parts or not math.isfinite(sum(parts)) else sum(parts)


def ratios(layers: list[dict]) -> list[float | None]:
    """Decode over prefill importance of each layer; infinite where prefill is 0, None where a side is unknown or both
    are 0."""
    pairs = [(total(entry, "decode"), total(entry, "prefill")) for entry in layers]
    return [_over(decode, prefill) for decode, prefill in pairs]


def depth_contrast(layers: list[dict]) -> float | None:
    """The mean decode/prefill ratio of the last third of the layers over that of the first third.

    None where a third has no ratio, or the first one's is 0.
    """
    first, last = third_ratios(layers)
    return None if not first or last is None else last / first


def third_ratios(layers: list[dict]) -> tuple[float | None, float | None]:
    """The mean decode/prefill ratio of the first and of the last third of the layers.

    The last layer's prefill importance is exactly 0, so its ratio is infinite and left out, like every such ratio.
    """
    every, third = ratios(layers), max(1, len(layers) // 3)
    known = [[r for r in part if r is not None and math.isfinite(r)] for part in (every[:third], every[-third:])]
    first, last = (sum(part) / len(part) if part else None for part in known)
    return first, last


def skipped_share(layers: list[dict], kind: str = "prefill") -> list[float] | None:
    """For each cutoff `0 .. L`, the share of the prefill importance, or of one kind's, in the layers from it up; None
    if that is unknown because a value is, or because all are 0."""
    values = [total(entry, kind) for entry in layers]
    if None in values or not 0 < sum(values) < math.inf:
        return None
    whole = math.fsum(values)
    return [math.fsum(values[cutoff:]) / whole for cutoff in range(len(values) + 1)]


def recommend(layers: list[dict], tolerance: float, kind: str = "prefill", least: int = 1) -> int | None:
    """The lowest cutoff, at least `least`, that skips at most a `tolerance` share of the prefill importance, or of one
    kind's (arXiv 2602.03295 skips what matters little; the rule is ours). None where the shares are unknown.

    Raises `PopError` unless the tolerance is a number from 0 to 1.
    """
    tolerance, shares = checked_tolerance(tolerance), skipped_share(layers, kind)
    return None if shares is None else max(least, next(c for c, share in enumerate(shares) if share <= tolerance))


def recommended(result: dict, tolerance: float) -> int | None:
    """`recommend` for a whole result, which knows what cutoffs its prompts can have."""
    return recommend(result["layers"], tolerance, least=result.get("lowest_cutoff", 1))


def cutoffs_by_kind(layers: list[dict], tolerance: float) -> dict | None:
    """`recommend` for the importance of image tokens alone, and of text tokens alone, as `{"image", "text"}`; None
    where the kinds were not told apart."""
    if not has_kinds(layers):
        return None
    return {kind: recommend(layers, tolerance, kind) for kind in KINDS}


def has_kinds(layers: list[dict]) -> bool:
    """Whether image tokens and text tokens were told apart."""
    return f"{KINDS[0]}_se" in layers[0]


def checked_tolerance(value) -> float:
    """A share from 0 to 1. Raises `PopError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise PopError(f"The tolerance is {str(value)[:40]!r}; it must be a number from 0 to 1.")
    return float(value)


def kl_at(cut_kl: list[dict], cutoff: int | None) -> float | None:
    """The measured divergence of a cutoff, None where it was not measured."""
    return next((entry["kl"] for entry in cut_kl if entry["cutoff"] == cutoff), None)


def speedup_at(predicted: list[dict], cutoff: int | None) -> float | None:
    """The predicted speed-up of a cutoff, None for none."""
    return next((entry["speedup"] for entry in predicted if entry["cutoff"] == cutoff), None)


def ablated(layers: list[dict], samples: list[dict]) -> dict:
    """The `ablation` of an `Importance`: means over samples by layer, and how the three opinions rank the layers.

    samples: `ablation.Ablation`s as dicts. Means that are not finite are None.
    """
    columns = {
        name: [mean_and_error(values)[0] for values in zip(*(sample[name] for sample in samples), strict=True)]
        for name in samples[0]
    }
    spearman = {}
    for stage in STAGES:
        gates = [total(entry, stage) for entry in layers]
        kl, influence = columns[f"{stage}_kl"], columns[f"{stage}_influence"]
        spearman[f"gates_ablation_{stage}"] = rank_correlation(gates, kl)
        spearman[f"gates_influence_{stage}"] = rank_correlation(gates, influence)
        spearman[f"influence_ablation_{stage}"] = rank_correlation(influence, kl)
    return {"samples": len(samples), "spearman": spearman, **columns}


def rank_correlation(first: list, second: list) -> float | None:
    """Spearman's, ties sharing their mean rank; None where a value is unknown or one side is constant."""
    import pandas  # here: half a second that a page need not wait for

    if None in first or None in second:
        return None
    a, b = (pandas.Series(values, dtype="float64").rank() for values in (first, second))
    return a.corr(b) if len(a) > 1 and a.nunique() > 1 and b.nunique() > 1 else None


def _over(decode: float | None, prefill: float | None) -> float | None:
    if decode is None or prefill is None or not (decode or prefill):
        return None
    return decode / prefill if prefill else math.inf
