"""What models are calibrated on, by kind: for fitting projections, for measuring importance, for the baselines.

The bundled text and, for a model with eyes, generated pictures with a question and its answer (`scenes.py`, from the
arrangements that training may see). Such a model gets no text of which more than half the tokens are unknown to its
tokenizer: that would teach it a row of unknown tokens. A model that reads text only has nothing else, and gets all.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from .text import bos_ids, encode_text

CALIBRATION = Path(__file__).parent.parent / "assets" / "calibration"
KINDS = ("code", "dialogue", "prose", "technical")
SEGMENT = 512  # tokens read at once
SHORTEST = 9  # of a kind's last segment
MOST_UNKNOWN = 0.5  # share of a kind's tokens
SCENES, SCENES_ALONE = 64, 256  # pictures beside the text, and where all of it is left out
SCENE_SEED = 20_260
SCENE_ANSWER = 64  # tokens at most


def read_kind(kind: str) -> str:
    """The text of one kind."""
    return (CALIBRATION / f"{kind}.txt").read_text(encoding="utf-8")


def read_all() -> str:
    """All kinds, one after the other."""
    return "\n\n".join(map(read_kind, KINDS))


def calibration_segments(tokenizer, known: bool = False) -> list[list[int]]:
    """The text as segments of at most `SEGMENT` ids, each with BOS where the model has one. known: without the kinds of
    which the tokenizer knows too little."""
    bos, found = bos_ids(tokenizer), []
    for kind in KINDS:
        ids = encode_text(tokenizer, read_kind(kind))
        if known and ids.count(tokenizer.unk_token_id) > MOST_UNKNOWN * len(ids):
            continue
        size = SEGMENT - len(bos)
        found += [bos + ids[at : at + size] for at in range(0, len(ids), size)]
    return [segment for segment in found if len(segment) >= SHORTEST]


def knows_no_text(engine) -> bool:
    """Whether a model with eyes knows too few of the text's words for any of it."""
    return engine.spec.sees and not calibration_segments(engine.loaded.tokenizer, known=True)


def scene_prompts(count: int, held_out: bool = False, seed: int = SCENE_SEED) -> Iterator[tuple[tuple, str, str]]:
    """(images, question, answer) of `count` generated pictures, all kinds of questions in turn."""
    return (scene_prompt(index, held_out, seed) for index in range(count))


def scene_prompt(index: int, held_out: bool = False, seed: int = SCENE_SEED) -> tuple[tuple, str, str]:
    """One of them: the same for the same numbers."""
    from . import scenes

    rng = random.Random(f"{seed} {held_out} {index}")
    scene = scenes.draw_scene(rng, held_out)
    asked, kind = scenes.questions(scene, rng), scenes.KINDS[index % len(scenes.KINDS)]
    question = next((question for question in asked if question.kind == kind), asked[0])
    return (scenes.picture(scene),), question.text, question.answer


class Calibration(Sequence):
    """What one engine's model is calibrated on, as `samples.Sample`s: its text, then its pictures, each drawn when it
    is asked for."""

    def __init__(self, engine):
        sees = engine.spec.sees
        self.engine, self.texts = engine, calibration_segments(engine.loaded.tokenizer, sees)
        self.scenes = (SCENES if self.texts else SCENES_ALONE) if sees else 0

    def __len__(self) -> int:
        return len(self.texts) + self.scenes

    def __getitem__(self, index: int):
        from .samples import Sample, image_samples  # here: a page reads the kinds of text without torch

        if not 0 <= index < len(self):
            raise IndexError(index)
        if index < len(self.texts):
            ids = self.texts[index]
            return Sample(tuple(ids), len(ids))
        return image_samples(self.engine, [scene_prompt(index - len(self.texts))], SCENE_ANSWER)[0]
