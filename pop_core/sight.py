"""What the pictures of one prompt give the decoder: plain tensors, made once by `vision.py`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """Where a picture stands in its prompt: the slot of its first token, and its tokens as a grid."""

    start: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class Sight:
    """One prompt's pictures; belongs to its run, like its cache.

    places: in the order of the prompt. features: `[n, hidden]` embeddings of all image tokens. deepstack: by level,
    `[n, hidden]` that joins them later. positions: `[3, N]` time, height and width of each token of the prompt, or None
    where positions are slots. ms: what the vision tower took.
    """

    places: tuple[Place, ...]
    features: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()
    positions: torch.Tensor | None = None
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt are picture."""
        return sum(place.tokens for place in self.places)

    @property
    def slots(self) -> torch.Tensor:
        """Their slots, `[n]`."""
        spans = [torch.arange(place.start, place.stop) for place in self.places]
        return torch.cat(spans).to(self.features.device)

    def placed(self, h: torch.Tensor) -> torch.Tensor:
        """The embeddings `[1, N, hidden]` with the pictures' own in their slots."""
        return h.index_copy(1, self.slots.to(h.device), self.features[None].to(h))

    def deepen(self, h: torch.Tensor, levels: list[int]) -> torch.Tensor:
        """The residual stream `[B, N, hidden]` of this prompt, in B variants, with these levels of DeepStack added."""
        for level in levels:
            h = h.index_add(1, self.slots.to(h.device), self.deepstack[level].to(h).expand(len(h), -1, -1))
        return h

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The positions of slots `[1, capacity]`, `[3, 1, capacity]`: text that follows the prompt counts on from the
        highest position, on all three rows. Or the slots themselves."""
        if self.positions is None:
            return slots
        length = self.positions.shape[1]
        following = slots[:, length:] - length + self.positions.max() + 1
        return torch.cat((self.positions[:, None], following.expand(3, 1, -1)), dim=-1)

    def blocks(self, capacity: int) -> torch.Tensor:
        """The number of each slot's picture, -1 for text, `[capacity]`."""
        numbers = torch.full((capacity,), -1, device=self.features.device)
        for number, place in enumerate(self.places):
            numbers[place.start : place.stop] = number
        return numbers
