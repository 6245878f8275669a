"""The peers' methods on the same engine, so that they stand in the same table. Only GRIFFIN sees the prompt.

- ShortGPT (arXiv 2403.03853): whole layers of least block influence (one minus the cosine of a layer's input and
  output) are dropped, in both stages; as many as hold the share of weights that the ratio takes from the FFNs.
- Wanda-sp (the structured form of Wanda, arXiv 2306.11695, as FLAP's paper defines it): in each FFN, the channels of
  least `||H_j||_2 * sum_i |W_down[i, j]|` over the text are left out.
- FLAP (arXiv 2312.11983, its metric WIFV and its structure AL, on FFNs alone): channels of least
  `Var(H_j) * ||W_down[:, j]||_2^2`, standardised in each FFN and compared over the whole model, are left out, and what
  they give on average is added as a bias.
- GRIFFIN (arXiv 2404.01365) looks at the prompt: a fixed mask by the norm of each channel's share in the tokens'
  activations. It is `ChannelPruning(ratio, 0, "none", "griffin")`.

The ratio is the same for all FFNs but FLAP's. An expert that no token of the text reached stays whole.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity

from .calibration import Calibration
from .channels import StaticChannels
from .decoder import Decoder, Positions
from .ffn import FfnWeights
from .plan import FLAP, WANDA_SP, Baseline, Plan
from .prefill import CausalAttention
from .stopping import Checkpoint, carry_on

TEXTS = 14  # segments of the calibration text, a third of it; of texts and pictures also a third


@dataclass(frozen=True)
class Statistics:
    """Of what the model is calibrated on. influence: of each layer. moments: by layer and FFN, the tokens that reached
    it, and the mean and the mean square of each channel's activations, `[channels]` float64."""

    influence: list[float]
    moments: list[list[tuple[int, torch.Tensor, torch.Tensor]]]


def ensure(engine, plan: Plan, progress=None, checkpoint: Checkpoint = carry_on) -> None:
    """Read what the model is calibrated on, once, if a plan needs it. progress: called with a fraction and a sentence.

    Raises `PopError` for packed or offloaded weights.
    """
    for fraction in ensure_steps(engine, plan, checkpoint):
        if progress:
            progress(fraction, "reading calibration text")


def ensure_steps(engine, plan: Plan, checkpoint: Checkpoint = carry_on) -> Iterator[float]:
    """The same, yielding how far it has come. Holds the model while it works."""
    if not plan.static or engine.statistics:
        return
    engine.require_readable("This baseline", "run it without")
    samples = Calibration(engine)
    number = -(-len(samples) // 3) if samples.scenes else min(TEXTS, len(samples))
    chosen = (samples[at * len(samples) // number] for at in range(number))
    statistics = None
    with engine.exclusive(checkpoint):
        for count, statistics in enumerate(calibrate(engine, chosen, checkpoint), start=1):  # noqa: B007
            checkpoint()
            yield count / number
        engine.statistics = statistics


@torch.inference_mode()
def calibrate(engine, samples: Iterable, checkpoint: Checkpoint = carry_on) -> Iterator[Statistics]:
    """The statistics of `samples.Sample`s, after each of them."""
    decoder, spec, device = engine.decoder, engine.spec, engine.decoder.devices[0]
    changes, tokens = [0.0] * spec.layers, 0
    sums = [[torch.zeros(3, ffn.channels, dtype=torch.float64) for ffn in ffns] for ffns in decoder.ffns]

    def see(i, e, _, hidden):
        hidden = hidden.double()
        ones = hidden.new_full((hidden.shape[1],), len(hidden))
        sums[i][e] += torch.stack((ones, hidden.sum(0), hidden.square().sum(0))).cpu()

    for sample in samples:
        sight, length = engine.look(sample.prompt, checkpoint), len(sample.ids)
        positions = Positions.build(decoder, length, device, sight=sight)
        attend, rope = CausalAttention(decoder, positions, length), positions.span(0, length)
        h = decoder.embed(torch.tensor([sample.ids], device=device), sight)
        for i in range(spec.layers):
            before, h = h, decoder.block(i, h, rope, attend, ffn=lambda i, x: decoder.ffn(i, x, see), sight=sight)
            change = 1 - cosine_similarity(before[0].float(), h[0].to(before.device).float(), dim=-1)
            changes[i] += change.sum().item()
        tokens += length
        yield Statistics([change / tokens for change in changes], [[_moments(s) for s in row] for row in sums])


def _moments(sums: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    count = int(sums[0, 0])
    return count, sums[1] / max(1, count), sums[2] / max(1, count)


def kept_layers(decoder: Decoder, statistics: Statistics, ratio: float, weights: float) -> list[int]:
    """ShortGPT: the layers that stay, ascending. weights: share of a layer's weights that its FFNs hold."""
    layers = decoder.spec.layers
    dropped = min(layers - 1, round(ratio * weights * layers))
    order = sorted(range(layers), key=lambda i: (-statistics.influence[i], i))
    return sorted(order[: layers - dropped])


def static_channels(decoder: Decoder, statistics: Statistics, baseline: Baseline) -> StaticChannels:
    """The sliced FFNs of Wanda-sp or FLAP. Reads weights."""
    keep = (_wanda_sp if baseline.name == WANDA_SP else _flap)(decoder, statistics, baseline.ratio)
    ffns = []
    for i, row in enumerate(decoder.ffns):
        ffns.append([])
        for e, whole in enumerate(row):
            if keep[i][e] is None:
                ffns[-1].append(whole)
                continue
            bias = _compensation(whole, statistics.moments[i][e][1], keep[i][e]) if baseline.name == FLAP else None
            ffns[-1].append(whole.take(keep[i][e].to(whole.down.device), decoder.row_blocks, bias))
    return StaticChannels(decoder, ffns)


def _wanda_sp(decoder: Decoder, statistics: Statistics, ratio: float) -> list[list[torch.Tensor | None]]:
    """The channels that stay, by layer and FFN; None: all of them."""
    keep = []
    for row, moments in zip(decoder.ffns, statistics.moments, strict=True):
        keep.append([])
        for ffn, (count, _, square) in zip(row, moments, strict=True):
            score = ffn.down.abs().sum(0).double().cpu() * (count * square).sqrt()
            keep[-1].append(_best(score, round((1 - ratio) * ffn.channels)) if count else None)
    return keep


def _flap(decoder: Decoder, statistics: Statistics, ratio: float) -> list[list[torch.Tensor | None]]:
    """The same over the whole model at once."""
    scores, owners = [], []
    for i, (row, moments) in enumerate(zip(decoder.ffns, statistics.moments, strict=True)):
        for e, (ffn, (count, mean, square)) in enumerate(zip(row, moments, strict=True)):
            if count:
                variance = (square - mean.square()).clamp(min=0) * count / max(1, count - 1)
                score = variance * ffn.down.float().square().sum(0).double().cpu()
                scores.append((score - score.mean()) / score.std().clamp(min=1e-300))
                owners.append((i, e))
    everywhere = torch.cat(scores)
    stays = torch.zeros(len(everywhere), dtype=torch.bool)
    stays[_best(everywhere, round((1 - ratio) * len(everywhere)))] = True
    keep = [[None] * len(row) for row in decoder.ffns]
    for (i, e), mask in zip(owners, stays.split([len(score) for score in scores]), strict=True):
        keep[i][e] = mask.nonzero().flatten()
    return keep


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest, ascending; ties go to the lower index."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _compensation(ffn: FfnWeights, mean: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """What the channels that go would have added on average, `[hidden]`."""
    gone = mean.clone()
    gone[keep] = 0
    return ffn.down @ gone.to(ffn.down.device, ffn.down.dtype)
