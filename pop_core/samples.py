"""What an analysis or a fit reads: prompts with a known continuation, of text alone or with pictures in front."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import memory
from .engine import Engine
from .generation import Generation
from .plan import DENSE
from .quality import text_segments
from .sampling import Sampling
from .stopping import Checkpoint, carry_on
from .text import Prompt, bos_ids, encode_text, picture_ids
from .units import count


@dataclass(frozen=True)
class Sample:
    """ids: of the prompt, which are `prompt_tokens`, and of its continuation. prompt: where it has pictures, for
    `Engine.look`."""

    ids: tuple[int, ...]
    prompt_tokens: int
    prompt: Prompt | None = None

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def image_tokens(self) -> int:
        return self.prompt.image_tokens if self.prompt else 0

    @property
    def boundary(self) -> int:
        """The index of the last prompt token: it writes the first new one, so it counts as decode."""
        return self.prompt_tokens - 1

    def digest(self, *more) -> bytes:
        """A hash of its tokens, its pictures and whatever else."""
        found = hashlib.sha256(repr((*more, list(self.ids))).encode())
        for _, tensor in sorted(self.prompt.pixels.tensors.items() if self.prompt else ()):
            found.update(tensor.contiguous().numpy().tobytes())
        return found.digest()


def text_samples(
    engine: Engine,
    text: str,
    prompt_tokens: int,
    new_tokens: int,
    count: int,
    images: Sequence = (),
    image_tokens: int | None = None,
    spread: bool = True,
) -> list[Sample]:
    """`count` pieces of a text, of `prompt_tokens` and `new_tokens` each; spread: as for `quality.text_segments`. With
    `images` (anything that `open_picture` takes) these stand in front of each piece, as in a prompt without a template,
    and come on top of its tokens.

    image_tokens: as for `Eyes.prepare`. Raises `PopError` as `quality.text_segments` does, and for pictures where the
    model has no eyes.
    """
    pieces = text_segments(engine, text, prompt_tokens, new_tokens, count, spread)
    if not images:
        return [Sample(tuple(piece), prompt_tokens) for piece in pieces]
    pixels = engine.eyes.prepare(images, image_tokens)
    bos, front = bos_ids(engine.loaded.tokenizer), picture_ids(engine.loaded.tokenizer, engine.eyes, pixels)
    read = len(front) + prompt_tokens
    engine.check_length(read, new_tokens, pixels.tokens)
    samples = []
    for piece in pieces:
        ids = (*bos, *front, *piece[len(bos) :])
        prompt = Prompt("", ids[:read], False, pixels.notices, 0.0, pixels)
        samples.append(Sample(ids, read, prompt))
    return samples


def image_samples(
    engine: Engine,
    prompts: Iterable[tuple[Sequence, str, str | None]],
    new_tokens: int,
    checkpoint: Checkpoint = carry_on,
    image_tokens: int | None = None,
) -> list[Sample]:
    """A sample of each (images, question, answer), in the chat template where the model has one.

    The continuation is the answer and the end token; where the answer is None, the dense model's own greedy one. It has
    at most `new_tokens`. Raises `PopError` for what `Engine.encode` refuses, and `NotEnoughMemory`.
    """
    samples, prompts = [], list(prompts)
    for number, (images, question, answer) in enumerate(prompts):
        checkpoint()
        prompt = engine.encode(question, Sampling(new_tokens), None, images, image_tokens)
        if number == 0 and prompt.pixels:
            need = len(prompts) * prompt.pixels.bytes
            memory.require(need, "cpu", f"what the eyes take of {count(len(prompts), 'prompt')} with pictures")
        if answer is None:
            written = _own_answer(engine, prompt, new_tokens, checkpoint)
        else:
            written = _known_answer(engine, prompt, answer)[:new_tokens]
        samples.append(Sample((*prompt.ids, *written), len(prompt.ids), prompt if images else None))
    return samples


def _known_answer(engine: Engine, prompt: Prompt, answer: str) -> list[int]:
    text = answer if prompt.chat else f" {answer}"
    return encode_text(engine.loaded.tokenizer, text) + ([min(engine.ends)] if engine.ends else [])


def _own_answer(engine: Engine, prompt: Prompt, new_tokens: int, checkpoint: Checkpoint) -> list[int]:
    generation = Generation(engine, prompt, DENSE, Sampling(new_tokens), checkpoint)
    with engine.exclusive(checkpoint):
        generation.prefill()
        while not generation.done:
            generation.step()
    return generation.tokens + ([generation.last.item()] if generation.stop == "end" else [])
