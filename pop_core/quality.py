"""What a plan costs in quality: KL, loss and agreement on held-out text.

Each segment's prompt is read under the plan and its continuation teacher-forced through the full model. Prompt
log-probabilities mean nothing when layers are skipped, so only the continuation counts.
"""

import random
from dataclasses import asdict, dataclass

from .divergence import divergence, mean, negative_log_likelihood
from .engine import Engine
from .errors import PopError
from .plan import DENSE, Plan
from .stopping import Checkpoint, carry_on
from .text import bos_ids, encode_text


@dataclass(frozen=True)
class Quality:
    """Means over all continuation tokens, in nats. agreement: share of equal best tokens. tokens: how many."""

    plan: dict
    loss_dense: float
    loss: float
    kl: float
    first_token_kl: float
    agreement: float
    tokens: int
    segments: int
    prompt_tokens: int
    new_tokens: int

    def to_dict(self) -> dict:
        return asdict(self)


def text_segments(
    engine: Engine, text: str, prompt_tokens: int, new_tokens: int, count: int, spread: bool = False
) -> list[list[int]]:
    """`count` pieces of `prompt_tokens + new_tokens` ids, each with BOS where the model has one.

    They follow each other; with `spread` they are spread evenly over the whole text, in a random order that is always
    the same, so that the first few stand for all. A prompt may overlap another piece then, but continuations never
    meet. Raises `PopError` when the text is too short or a piece longer than
    the model's context.
    """
    for number, name in ((prompt_tokens, "prompt tokens"), (new_tokens, "new tokens"), (count, "pieces")):
        if number < 1:
            raise PopError(f"The number of {name} is {number}; it must be at least 1.")
    engine.check_length(prompt_tokens, new_tokens)
    bos = bos_ids(engine.loaded.tokenizer)
    ids, size = encode_text(engine.loaded.tokenizer, text), prompt_tokens + new_tokens - len(bos)
    need = size + new_tokens * (count - 1) if spread else size * count
    if len(ids) < need:
        how = "overlapping pieces" if spread else "pieces"
        raise PopError(f"The text has {len(ids):,} tokens; {count} {how} of {size} tokens need at least {need:,}.")
    span, parts = (len(ids) - size, max(1, count - 1)) if spread else (size, 1)
    starts = [at * span // parts for at in range(count)]
    pieces = [bos + ids[start : start + size] for start in starts]
    if spread:
        random.Random(0).shuffle(pieces)
    return pieces


def measure(engine: Engine, samples: list, plans: list[Plan], checkpoint: Checkpoint = carry_on) -> list[Quality]:
    """The quality of each plan on the same `samples.Sample`s, all of one length; the dense model reads each once."""
    first = samples[0]
    for plan in plans:
        engine.check(plan, first.prompt is not None)
    sums = [{"loss": [], "kl": [], "first": [], "same": []} for _ in plans]
    dense_losses = []
    with engine.exclusive(checkpoint):
        for sample in samples:
            prompt = engine.token_ids(sample.ids[: sample.prompt_tokens])
            continuation = engine.token_ids(sample.ids[sample.prompt_tokens :])
            sight = engine.look(sample.prompt, checkpoint)
            dense = engine.continuation_logits(prompt, continuation, DENSE, sight)
            dense_losses += negative_log_likelihood(dense, continuation[0])
            for plan, total in zip(plans, sums, strict=True):
                checkpoint()
                logits = engine.continuation_logits(prompt, continuation, plan, sight)
                kl, same = divergence(dense, logits)
                total["loss"] += negative_log_likelihood(logits, continuation[0])
                total["kl"] += kl
                total["first"].append(kl[0])
                total["same"] += same
    return [
        Quality(
            plan=plan.to_dict(),
            loss_dense=mean(dense_losses),
            loss=mean(total["loss"]),
            kl=mean(total["kl"]),
            first_token_kl=mean(total["first"]),
            agreement=mean(total["same"]),
            tokens=len(dense_losses),
            segments=len(samples),
            prompt_tokens=first.prompt_tokens,
            new_tokens=first.new_tokens,
        )
        for plan, total in zip(plans, sums, strict=True)
    ]
