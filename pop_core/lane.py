"""What one sequence has of one FFN whose channels were chosen, and the fast way of a single token through it."""

from dataclasses import dataclass

import torch

from .decoder import Decoder
from .ffn import FfnWeights


@dataclass(frozen=True)
class Part:
    """What one sequence has of one FFN.

    weights: retained channels, then candidates, then zeros. channels: of the whole FFN. whole: all of them stayed.
    first, last: where the candidates are. chosen: how many of them a token keeps. norms: their `c_j`, float32, or None
    where the weights multiply their activations by it already. region: `[channels]`, uint8, or None where there is no
    partition. scores: `[channels]`, float32, or None.
    """

    weights: FfnWeights
    channels: int
    whole: bool = False
    first: int = 0
    last: int = 0
    chosen: int = 0
    norms: torch.Tensor | None = None
    region: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    @property
    def kept(self) -> int:
        """Channels that contribute to a token."""
        return self.channels if self.whole else self.first + self.chosen


class Lane:
    """One token through one sliced FFN on a CPU: what `OnlineChannels._choose` and `Decoder.gated_ffn` do, without
    making a tensor or a view that the step before had already. A decode step is bound by memory traffic, so whatever
    else it does should be next to nothing."""

    def __init__(self, decoder: Decoder, part: Part):
        weights, blocks = part.weights, decoder.row_blocks
        width, hidden = weights.channels, weights.down.shape[0]
        self.decoder, self.part, self.blocks, self.hidden = decoder, part, blocks, hidden
        self.ins = weights.ins[0].view(blocks, 2 * width // blocks, hidden)
        self.down = weights.down.view(blocks, hidden // blocks, width)
        self.both = self.ins.new_empty(blocks, 2 * width // blocks, 1)
        self.flat = self.both.view(-1)
        self.gate, self.up = self.flat.chunk(2)
        self.column = self.gate.as_strided((blocks, width, 1), (0, 1, width))
        self.rescored = part.chosen < part.last - part.first
        if self.rescored:
            self.band = self.gate[part.first : part.last]
            self.scores = torch.empty_like(self.band)
            self.losers = len(self.band) - part.chosen
            self.least = self.band.new_empty(self.losers)
            self.dropped = torch.empty(self.losers, dtype=torch.long)  # by the last token
            # the same memory for numpy, which needs half of torch's time to write a hundred zeros
            self.band_zeros, self.dropped_zeros = self.band.numpy(), self.dropped.numpy()

    @staticmethod
    def fits(decoder: Decoder, part: Part) -> bool:
        """Whether the weights are one matrix for gate and up, in rows that the threads can share."""
        weights, blocks = part.weights, decoder.row_blocks
        shared = not weights.channels % blocks and not weights.down.shape[0] % blocks
        return decoder.plain and len(weights.ins) == 1 and shared and weights.channels > 0

    def __call__(self, x: torch.Tensor, rescoring) -> torch.Tensor:
        weights = self.part.weights
        torch.bmm(self.ins, x.as_strided((self.blocks, self.hidden, 1), (0, 1, self.hidden)), out=self.both)
        if weights.in_biases is not None:
            self.flat.add_(weights.in_biases[0])
        torch.mul(self.decoder.activated(weights.activation, self.gate), self.up, out=self.gate)
        if self.rescored:
            with rescoring:
                torch.abs(self.band, out=self.scores)
                if self.part.norms is not None:
                    self.scores *= self.part.norms
                torch.topk(self.scores, self.losers, largest=False, sorted=False, out=(self.least, self.dropped))
                self.band_zeros[self.dropped_zeros] = 0
        out = torch.bmm(self.down, self.column).view_as(x)
        return out if weights.down_bias is None else out.add_(weights.down_bias)
