"""What a run did with its FFN channels, as plain data: regions, the candidates of each token, how they overlap, times.

A layer with one FFN is described channel by channel; of a mixture's experts only numbers are told, since it may have
thousands of them.
"""

import torch

from . import costs
from .channels import CANDIDATE, PRUNED, RETAINED, OnlineChannels
from .families import DecoderSpec
from .state import State

LETTERS = {RETAINED: "r", CANDIDATE: "c", PRUNED: "p"}
BINS = 96  # of a layer's channels, sorted by their score


def facts(channels: OnlineChannels) -> dict:
    """Of a run of one sequence, once its prompt is read.

    ffns, whole_ffns: how many there are, and how many stayed whole because no prompt token reached them. layers:
    `layer_facts` of each. overlap: mean over the layers, None before two tokens were written. *_ms: once for
    the prompt; rescoring_ms for all tokens written, None on a GPU.
    """
    parts = channels.parts[0]
    layers = [layer_facts(channels, i) for i in range(channels.decoder.spec.layers)]
    overlaps = [layer["overlap"] for layer in layers if layer["overlap"] is not None]
    return {
        "ffns": sum(map(len, parts)),
        "whole_ffns": sum(part.whole for row in parts for part in row),
        "layers": layers,
        "overlap": sum(overlaps) / len(overlaps) if overlaps else None,
        "scoring_ms": channels.scoring.milliseconds,
        "slicing_ms": channels.slicing.milliseconds,
        "rescoring_ms": channels.rescoring_ms,
    }


def removed_share(state: State, whole: DecoderSpec) -> float:
    """Weights that contribute nothing to a token written, as a share of the model's, counted on what was really sliced
    and dropped. whole: the spec of the model with all of its layers."""
    spec, lost = state.decoder.spec, costs.layer_weights(whole) - costs.layer_weights(state.decoder.spec)
    if state.channels:
        kept = sum(map(sum, state.channels.kept()))
        lost += 3 * spec.hidden * (sum(sum(spec.ffn_widths(i)) for i in range(spec.layers)) - kept)
    return lost / costs.parameters(whole)


def layer_facts(channels: OnlineChannels, i: int) -> dict:
    """One layer.

    retained, candidates, pruned, chosen: numbers of channels, over all FFNs of the layer. For a layer with one FFN:
    regions: a letter for each channel, r, c or p ("" without a partition). profile: the scores from the highest to the
    lowest, `BINS` means as shares of the highest. kept: for each token after the first a hexadecimal number whose bits,
    the highest first, say which of the candidates (by index) it kept. overlap: share of a token's kept candidates that
    the next one keeps too, None where there is nothing to compare. For a mixture: tokens: of the prompt routed to each
    expert, the shared one last. whole: experts that stayed whole.
    """
    parts, sparse = channels.parts[0][i], i in channels.decoder.spec.sparse
    budgets = {
        "retained": sum(part.first if not part.whole else part.weights.channels for part in parts),
        "candidates": sum(part.last - part.first for part in parts),
        "pruned": sum(part.channels - part.last for part in parts if not part.whole),
        "chosen": sum(part.chosen for part in parts),
    }
    if sparse:
        tokens = [channels.reached.get((i, e), [0])[0] for e in range(len(parts))]
        whole = [e for e, part in enumerate(parts) if part.whole]
        return budgets | {"tokens": tokens, "whole": whole, "overlap": None}
    part = parts[0]
    kept = _kept(channels, i, part)
    return budgets | {
        "regions": "" if part.region is None else "".join(LETTERS[r] for r in part.region.tolist()),
        "profile": _profile(part.scores),
        "kept": [f"{int(''.join(map(str, row)), 2):x}" for row in kept.int().tolist()] if kept.numel() else [],
        "overlap": _overlap(kept),
    }


def _kept(channels: OnlineChannels, i: int, part) -> torch.Tensor:
    """`[tokens, candidates]`: which of the candidates each token kept."""
    dropped = [step[i] for step in channels.history if step[i] is not None]
    kept = torch.ones(len(dropped), part.last - part.first, dtype=torch.bool)
    for row, lost in zip(kept, dropped, strict=True):
        row[lost.cpu()] = False
    return kept


def _overlap(kept: torch.Tensor) -> float | None:
    """Share of what one row keeps that the next one keeps too, over all pairs."""
    size = int(kept[0].sum()) if len(kept) else 0
    if len(kept) < 2 or not size:
        return None
    return (kept[1:] & kept[:-1]).sum().item() / size / (len(kept) - 1)


def _profile(scores: torch.Tensor | None) -> list[float]:
    if scores is None:
        return []
    ordered = scores.double().sort(descending=True).values.cpu()
    highest = ordered[0].item()
    if not highest > 0:
        return []
    return [part.mean().item() / highest for part in ordered.tensor_split(min(BINS, len(ordered)))]


def top_half_overlap(scores: torch.Tensor) -> float | None:
    """How much of the top half of the channels, by the scores `[T, channels]`, stays so at the next token."""
    half = torch.zeros_like(scores, dtype=torch.bool)
    return _overlap(half.scatter_(-1, scores.topk(scores.shape[-1] // 2, dim=-1).indices, True))
