"""Which token comes next, when to stop, and text that appears whole characters at a time."""

import math
from dataclasses import asdict, dataclass

import torch
from tokenizers.decoders import DecodeStream

from .errors import PopError
from .plan import whole_number


@dataclass(frozen=True)
class Sampling:
    """How an answer is written. temperature 0 is greedy; top_k 0 and top_p 1 switch those filters off.

    seed: of the run's own generator, so that equal plans give equal text. stop: strings that end the answer and are
    not part of it.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("max_new_tokens", "top_k", "seed"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name.replace("_", " ")))
        object.__setattr__(self, "temperature", _number(self.temperature, "temperature", 0, 10))
        object.__setattr__(self, "top_p", _number(self.top_p, "top p", 0, 1))
        object.__setattr__(self, "stop", _texts(self.stop))
        if self.max_new_tokens < 1:
            raise PopError(f"The answer length is {self.max_new_tokens} tokens; it must be at least 1.")
        if self.top_k < 0:
            raise PopError(f"The top k is {self.top_k}; it must be 0 (off) or more.")
        if self.seed < 0:
            raise PopError(f"The seed is {self.seed}; it must be between 0 and 2^63 - 1.")

    def to_dict(self) -> dict:
        return asdict(self) | {"stop": list(self.stop)}


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """The next token of each row of `[B, vocab]` as `[B, 1]`, or -1 where the logits are not finite.

    The check is part of the returned tensor, so that the only wait for the device is reading the token.
    """
    finite = torch.isfinite(logits).all(-1, keepdim=True)
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        scores = logits.float()
        scores = scores - scores.max(-1, keepdim=True).values  # or a tiny temperature would make infinities
        scores = _filtered(scores / sampling.temperature, sampling)
        probabilities = torch.where(finite, scores.softmax(-1), 1.0)  # anything that multinomial accepts
        token = probabilities.multinomial(1, generator=generator)
    return torch.where(finite, token, -1)


def _filtered(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores `[B, vocab]` with all but the top k, then all but the top-p nucleus, at minus infinity."""
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        ranked, order = scores.sort(dim=-1, descending=True)
        mass = ranked.softmax(-1)
        beyond = mass.cumsum(-1) - mass >= sampling.top_p
        beyond[..., 0] = False  # the best token always stays
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)
    return scores


def end_ids(model, tokenizer) -> frozenset[int]:
    """Every id that ends an answer: the union of generation config, config and tokenizer."""
    found = set()
    configs = model.generation_config, model.config, model.config.get_text_config()
    for ids in (*(getattr(config, "eos_token_id", None) for config in configs), tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset(i for i in found if i is not None)


class TextStream:
    """Tokens in, text out: only whole characters, and nothing that may yet become a stop string.

    `text` is what may be shown, `stopped` whether a stop string has appeared.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self.backend, self.stop = tokenizer.backend_tokenizer, stop
        self.stream = DecodeStream(skip_special_tokens=True)
        self.text, self.pending, self.stopped = "", "", False

    def push(self, token: int) -> str:
        """Add one token; returns the text it completes (empty while a character is unfinished)."""
        piece = self.stream.step(self.backend, token) or ""
        self.pending += piece
        cuts = [at for at in (self.pending.find(text) for text in self.stop) if at >= 0]
        if cuts:
            self.stopped = True
            self.text, self.pending = self.text + self.pending[: min(cuts)], ""
        else:
            keep = self._possible_stop()
            done = len(self.pending) - keep
            self.text, self.pending = self.text + self.pending[:done], self.pending[done:]
        return piece

    def finish(self) -> str:
        """The whole answer: what was held back for a stop string that never came belongs to it."""
        self.text, self.pending = self.text + self.pending, ""
        return self.text

    def _possible_stop(self) -> int:
        """Characters at the end of `pending` that could begin a stop string."""
        longest = max((len(text) for text in self.stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(self.pending)), 0, -1) if self._begins_stop(self.pending[-n:])), 0
        )

    def _begins_stop(self, tail: str) -> bool:
        return any(text.startswith(tail) for text in self.stop)


def _texts(stop) -> tuple[str, ...]:
    """Stop strings without empty ones."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) for text in texts):
        raise PopError("The stop strings must be text.")
    return tuple(text for text in texts if text)


def _number(value, name: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise PopError(f"The {name} is {value!r}; it must be a number between {low} and {high}.")
    return number
