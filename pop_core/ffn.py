"""One gated FFN by its weights, whole or with fewer channels: `y = W_down (act(W_gate x) * W_up x)`.

A *channel* is a row of `W_gate` and of `W_up` and a column of `W_down`. Layers whose weights cannot be read are called
through their modules instead (`Decoder.ffn`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# (layer, FFN of the layer, tokens among all that were given or None for all [n], activations [n, channels])
See = Callable[[int, int, torch.Tensor | None, torch.Tensor], None]

SMALLEST = 1e-20  # factor


@dataclass(frozen=True)
class FfnWeights:
    """Weights of `K` channels.

    ins: what makes gate and up: one matrix `[2K, hidden]`, gate first, or two of `[K, hidden]`. in_biases: of the same
    rows, or None. down: `[hidden, K]`. down_bias: `[hidden]` or None. activation: a module. filling: how many of the
    channels, the last ones, are nothing but zeros.
    """

    ins: tuple[torch.Tensor, ...]
    in_biases: tuple[torch.Tensor, ...] | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: torch.nn.Module
    filling: int = 0

    @property
    def channels(self) -> int:
        return self.down.shape[1]

    @property
    def nbytes(self) -> int:
        """What one token reads."""
        return sum(part.numel() * part.element_size() for part in (*self.ins, self.down))

    def take(self, keep: torch.Tensor, multiple: int, bias: torch.Tensor | None = None) -> "FfnWeights":
        """The channels `keep` `[K]`, in this order, copied into one matrix for gate and up and one for down, filled up
        with channels of zeros to a multiple of `multiple`. bias: to be added to the output, `[hidden]`."""
        width = -(-len(keep) // multiple) * multiple
        gate, up = self._halves(self.ins)
        ins = gate.new_zeros(2 * width, gate.shape[1])
        for half, start in ((gate, 0), (up, width)):
            torch.index_select(half, 0, keep, out=ins[start : start + len(keep)])
        down = self.down.new_zeros(self.down.shape[0], width)
        down[:, : len(keep)] = self.down.index_select(1, keep)
        biases = None
        if self.in_biases is not None:
            biases = ins.new_zeros(2 * width)
            for half, start in zip(self._halves(self.in_biases), (0, width), strict=True):
                biases[start : start + len(keep)] = half[keep]
            biases = (biases,)
        if bias is None or self.down_bias is None:
            bias = self.down_bias if bias is None else bias
        else:
            bias = bias + self.down_bias
        return FfnWeights((ins,), biases, down, bias, self.activation, width - len(keep))

    def fold(self, first: int, last: int, factors: torch.Tensor) -> None:
        """Change the copied weights so that the activations of the channels `first .. last-1` come out multiplied by
        `factors` `[last - first]`, and the output stays what it was."""
        factors = factors.clamp(min=SMALLEST)  # a channel of weight 0 in `down` keeps it
        up = slice(self.channels + first, self.channels + last)
        self.ins[0][up] *= factors[:, None]
        if self.in_biases is not None:
            self.in_biases[0][up] *= factors
        self.down[:, first:last] /= factors

    @staticmethod
    def _halves(parts: tuple[torch.Tensor, ...]):
        return parts if len(parts) == 2 else parts[0].chunk(2)


def of_module(part) -> FfnWeights:
    """The weights of an ordinary FFN module."""
    biases = (part.gate_proj.bias, part.up_proj.bias)
    return FfnWeights(
        (part.gate_proj.weight, part.up_proj.weight),
        None if biases[0] is None else biases,
        part.down_proj.weight,
        part.down_proj.bias,
        part.act_fn,
    )
