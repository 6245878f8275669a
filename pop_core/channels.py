"""Partition-guided Online Pruning (arXiv 2602.06822, section 3): FFN channels by prompt, and again by token.

While the prompt is read, dense, every channel is scored: `I_j = c_j * ||H_j||_2`, the norm of its activations over the
prompt's tokens times how much its column of `W_down` weighs. Then the channels of each FFN are split into retained,
candidate and pruned ones, and the first two are copied once into contiguous weights. Each token written re-scores the
candidates with its own activations and keeps the best of them; the activations of the others become 0.

Each sequence of a batch has its own scores, partition and slices, and each expert of a mixture too, from the tokens
routed to it. An FFN that no prompt token reached (an expert, or a layer that the whole prompt skipped) stays whole
(ours). In layers that a `PrefillCut` skips, the sinks and the boundary are the only tokens to score.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from . import experts
from .decoder import Decoder, Ffn, one_token
from .ffn import FfnWeights
from .lane import Lane, Part
from .plan import ALL, GRIFFIN, L2, MAX, ChannelPruning
from .timing import Stopwatch

RETAINED, CANDIDATE, PRUNED = 0, 1, 2  # regions


class OnlineChannels:
    """The FFNs of one run: `reading` the prompt, `partition`, then `writing`."""

    def __init__(self, decoder: Decoder, pruning: ChannelPruning, norms: list[list[torch.Tensor]], batch: int = 1):
        """norms: `column_norms` for the pruning's score."""
        self.decoder, self.pruning, self.norms, self.batch = decoder, pruning, norms, batch
        self.squares: dict[tuple[int, int], torch.Tensor] = {}  # (layer, FFN) -> [B, channels]
        self.reached: dict[tuple[int, int], list[int]] = {}  # -> prompt tokens of each sequence
        self.parts: list[list[list[Part]]] = []  # by sequence, layer and FFN
        self.scoring, self.slicing = Stopwatch(decoder.devices[0]), Stopwatch(decoder.devices[0])
        # a decode step on a GPU may be captured as a graph, which events cannot be part of
        self.rescoring = nullcontext() if self.scoring.cuda else Stopwatch(decoder.devices[0])
        self.dropped: list[torch.Tensor | Lane | None] = [None] * decoder.spec.layers  # of the last token, or who knows
        self.history: list[list[torch.Tensor | None]] = []
        self._lanes: dict[int, Lane | None] = {}  # by the id of their part
        self.bytes_read = 0  # of FFN weights, while writing

    def reading(self, counted: torch.Tensor | None) -> Ffn:
        """The dense FFN of prompt tokens, scored on the way. counted: `[B, T]`, which tokens count, or None for all."""
        return lambda i, x: self.decoder.ffn(i, x, partial(self._score, counted, x.shape[1]))

    def partition(self) -> None:
        """Split the channels by their scores and slice the weights. Called once, when the prompt is read."""
        with self.slicing:
            self.parts = [
                [[self._part(row, i, e) for e in range(len(ffns))] for i, ffns in enumerate(self.decoder.ffns)]
                for row in range(self.batch)
            ]
        self.squares.clear()

    def writing(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The FFN of written tokens, `[B, T, hidden]`: each of them chooses its own candidates."""
        if self.batch == 1:
            return self._write(self.parts[0][i], i, x)
        return torch.cat([self._write(parts[i], i, row) for parts, row in zip(self.parts, x.split(1), strict=True)])

    def kept(self) -> list[list[int]]:
        """Channels that contribute to a token of the first sequence, by layer and FFN."""
        return [[part.kept for part in row] for row in self.parts[0]]

    @property
    def rescoring_ms(self) -> float | None:
        """Time spent on re-scoring so far; None on a GPU, where it is not measured."""
        return self.rescoring.milliseconds if isinstance(self.rescoring, Stopwatch) else None

    def note(self) -> None:
        """Remember which candidates the last token dropped, by layer; None for mixtures and for layers that dropped
        none."""
        lost = [part.dropped if isinstance(part, Lane) else part for part in self.dropped]
        self.history.append([None if part is None else part.flatten().clone() for part in lost])

    def _score(self, counted, length: int, i: int, e: int, tokens: torch.Tensor | None, hidden: torch.Tensor) -> None:
        with self.scoring:
            rows, real = self._rows(counted, length, tokens, hidden.device)
            self.reached[i, e] = [len(hidden)] if real is None else rows[real].bincount(minlength=self.batch).tolist()
            if self.pruning.rescore == ALL:  # there is no partition to make
                return
            squares = hidden.float().square()
            if self.pruning.score == GRIFFIN:
                squares /= squares.sum(-1, keepdim=True).clamp(min=torch.finfo(squares.dtype).tiny)
            if real is None:
                self.squares[i, e] = squares.sum(0, keepdim=True)
            else:
                sums = squares.new_zeros(self.batch, squares.shape[1])
                self.squares[i, e] = sums.index_add_(0, rows[real], squares[real])

    def _rows(self, counted: torch.Tensor | None, length: int, tokens: torch.Tensor | None, device):
        """The sequence of each token and whether it counts; None and None where there is one sequence, and all do."""
        if self.batch == 1 and counted is None:
            return None, None
        rows = torch.arange(self.batch, device=device).repeat_interleave(length)
        real = torch.ones_like(rows, dtype=torch.bool) if counted is None else counted.to(device).flatten()
        return (rows, real) if tokens is None else (rows[tokens], real[tokens])

    def _part(self, row: int, i: int, e: int) -> Part:
        weights, norms = self.decoder.ffns[i][e], self.norms[i][e]
        budget = self.pruning.budget(weights.channels)
        if self.pruning.rescore == ALL:
            return Part(weights, weights.channels, last=weights.channels, chosen=budget.chosen, norms=norms)
        if not self.reached.get((i, e), [0] * self.batch)[row]:
            return Part(weights, weights.channels, whole=True)
        scores = norms * self.squares[i, e][row].sqrt()
        # a stable sort breaks ties by index; inside of a region the order is the model's
        order = scores.sort(descending=True, stable=True).indices
        retained, candidates = order[: budget.sliced].split((budget.retained, budget.candidates))
        retained, candidates = retained.sort().values, candidates.sort().values
        region = torch.full_like(order, PRUNED, dtype=torch.uint8)
        region[retained], region[candidates] = RETAINED, CANDIDATE
        sliced, norms = weights.take(torch.cat((retained, candidates)), self.decoder.row_blocks), norms[candidates]
        if self.decoder.plain:  # in a coarser number format this would move weights
            sliced.fold(budget.retained, budget.sliced, norms)
            norms = None
        return Part(
            weights=sliced,
            channels=weights.channels,
            first=budget.retained,
            last=budget.sliced,
            chosen=budget.chosen,
            norms=norms,
            region=region,
            scores=scores,
        )

    def _write(self, parts: list[Part], i: int, x: torch.Tensor) -> torch.Tensor:
        if i not in self.decoder.spec.sparse:
            return self._ffn(parts[0], i, x)
        mixture = self.decoder.layers[i].mlp
        return experts.mixed(mixture, x, lambda e, tokens, states: self._ffn(parts[e], i, states))

    def _ffn(self, part: Part, i: int, x: torch.Tensor) -> torch.Tensor:
        self.bytes_read += part.weights.nbytes
        if one_token(x) and (lane := self._lane(part)):
            out = lane(x, self.rescoring)
            if lane.rescored and i not in self.decoder.spec.sparse:
                self.dropped[i] = lane
            return out
        return self.decoder.gated_ffn(part.weights, x, partial(self._choose, part, i))

    def _choose(self, part: Part, i: int, hidden: torch.Tensor) -> None:
        """Set the activations of the candidates that lose to 0. Not finite ones win, so that they are noticed."""
        if part.chosen == part.last - part.first:
            return
        with self.rescoring:
            band = hidden[..., part.first : part.last]
            scores = band.abs() if part.norms is None else (band * part.norms).abs_()
            dropped = scores.topk(part.last - part.first - part.chosen, largest=False, sorted=False).indices
            band.scatter_(-1, dropped, 0)
        if i not in self.decoder.spec.sparse:
            self.dropped[i] = dropped

    def _lane(self, part: Part) -> "Lane | None":
        """The fast way for a single token through a part, where there is one."""
        if id(part) not in self._lanes:
            self._lanes[id(part)] = Lane(self.decoder, part) if Lane.fits(self.decoder, part) else None
        return self._lanes[id(part)]


class StaticChannels:
    """FFNs with the same channels left out in both stages, whatever the prompt: by layer and FFN."""

    def __init__(self, decoder: Decoder, ffns: list[list[FfnWeights]]):
        self.decoder, self.ffns = decoder, ffns
        self.bytes_read = 0  # of FFN weights, while writing

    def reading(self, counted: torch.Tensor | None) -> Ffn:
        return self.writing

    def partition(self) -> None:
        """There is nothing to learn from the prompt: only what is written counts from here."""
        self.bytes_read = 0

    def kept(self) -> list[list[int]]:
        """Channels that stay, by layer and FFN."""
        return [[ffn.channels - ffn.filling for ffn in row] for row in self.ffns]

    def writing(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i not in self.decoder.spec.sparse:
            return self._ffn(self.ffns[i][0], x)
        mixture = self.decoder.layers[i].mlp
        return experts.mixed(mixture, x, lambda e, tokens, states: self._ffn(self.ffns[i][e], states))

    def _ffn(self, weights: FfnWeights, x: torch.Tensor) -> torch.Tensor:
        self.bytes_read += weights.nbytes
        return self.decoder.gated_ffn(weights, x)


Reduce = Callable[[torch.Tensor], torch.Tensor]
AGGREGATES: dict[str, Reduce] = {
    "sum": lambda down: down.abs().sum(0),
    L2: lambda down: down.square().sum(0).sqrt(),
    MAX: lambda down: down.abs().amax(0),
    GRIFFIN: lambda down: down.new_ones(down.shape[1]),
}


def column_norms(decoder: Decoder, score: str) -> list[list[torch.Tensor]]:
    """`c_j` of each channel by layer and FFN, `[channels]` float32: the paper leaves open how the rows of `W_down` are
    put together; see `ChannelPruning.score`. Reads weights."""
    return [[AGGREGATES[score](ffn.down.float()) for ffn in ffns] for ffns in decoder.ffns]
