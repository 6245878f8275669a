"""How far one model's predictions are from another's, token by token."""

import torch

CHUNK = 32  # rows of logits turned into probabilities at once: a vocabulary of 262k makes them large


def divergence(dense: torch.Tensor, pruned: torch.Tensor) -> tuple[list[float], list[bool]]:
    """Per row of two logits `[T, vocab]`: KL(dense || pruned) in nats, and whether the best token is the same."""
    kl, same = [], []
    for a, b in zip(dense.split(CHUNK), pruned.split(CHUNK), strict=True):
        p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).clamp(min=0).tolist()
        same += (a.argmax(-1) == b.argmax(-1)).tolist()
    return kl, same


def negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Per row of logits `[T, vocab]`: minus the log-probability of `targets` `[T]`, in nats."""
    losses = []
    for rows, ids in zip(logits.split(CHUNK), targets.split(CHUNK), strict=True):
        losses += torch.nn.functional.cross_entropy(rows.float(), ids, reduction="none").tolist()
    return losses


def mean(values: list) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None
