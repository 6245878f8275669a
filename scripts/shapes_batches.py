"""What Shapes-VL learns from: pictures with all their questions in one row, and where its heads should look.

One pass over a picture serves all questions about it: they stand behind it one after the other, each with the positions
it would have alone, and none sees another.
"""

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes_model import IMAGE_TOKENS, MERGE, OTHER_WORDS, PATCH, SIDE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pop_core.scenes import COLOURS, GRID, NO_PICTURE, SHAPES, Question, Scene, draw_scene, picture, questions

WHITE = (255, 255, 255)
QUESTIONS = 14  # about a picture, the one that is put without it included
WEIGHTED_FROM, WEIGHTS = 900, {"colour": 3.0, "place": 2.0, "describe": 2.0}  # steps; kinds whose answers weigh more
LOOKING_FROM, LOOKING = 300, (0, 0)  # steps; the layer, and its head, taught to look from a shape's word at that shape
READING_FROM, READING = 1600, (1, 1)  # the same, taught to look from where the answer begins at the shape's word


def layout(tokenizer):
    """What every example has in common: ids in front of the questions, and ids between question and answer."""
    around = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = around.split(" ?")
    before = before.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS)
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]


@dataclass
class Batch:
    """One part of a step. ids: [pictures, length]; positions: [3, pictures, length]; mask: [pictures, 1, length,
    length]; learn: [pictures, length], the weight of a token's answer over the tokens of that answer, 0 elsewhere.
    looks: what to guide of each (layer, head)."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    learn: torch.Tensor
    pixels: dict
    looks: dict


@dataclass(frozen=True)
class Look:
    """Where a token should look: from its slot, among these slots at those wanted."""

    row: int
    slot: int
    among: list[int]
    wanted: list[int]


def batch(tokenizer, processor, rng: random.Random, pictures: int, step: int) -> Batch:
    """Pictures with the questions about them, and one that is put without a picture.

    A segment is the front (0), a question that sees it, or one (negative) that sees none of it but the role.
    """
    front, between = layout(tokenizer)
    role, end = front.index(tokenizer.convert_tokens_to_ids("<|vision_start|>")), tokenizer.eos_token_id
    front_positions = torch.tensor(positions_of_front(len(front), role))
    first = int(front_positions.max()) + 1
    scenes = [draw_scene(rng) for _ in range(pictures)]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    image = [slot for slot, token in enumerate(front) if token == image_id]
    rows, looks = [], {LOOKING: [], READING: []}
    for scene in scenes:
        ids, segments, positions, learn = list(front), [0] * len(front), [], [0.0] * len(front)
        asked = questions(scene, rng)
        whole = next(q for q in asked if q.kind == "describe")
        others = [q for q in asked if q is not whole][: QUESTIONS - 2]
        for number, question in enumerate([whole, *others, Question("blind", blind_prompt(rng), NO_PICTURE)], 1):
            blind = question.kind == "blind"
            asking = tokenizer(" " + question.text, add_special_tokens=False).input_ids + between
            reply = [*tokenizer(" " + question.answer, add_special_tokens=False).input_ids, end]
            start, length = role if blind else first, len(asking) + len(reply)
            if step >= LOOKING_FROM and (shape := shape_sought(question)):
                word = len(ids) + asking.index(tokenizer.convert_tokens_to_ids(f"▁{shape}"))
                thing = next(thing for thing in scene.things if thing.shape == shape)
                cells = contents(Scene((thing,), WHITE))[:, 0].tolist()
                wanted = [slot for slot, cell in zip(image, cells, strict=True) if cell]
                looks[LOOKING].append(Look(len(rows), word, image, wanted))
                if step >= READING_FROM:
                    last = len(ids) + len(asking) - 1
                    seen = [*range(len(front)), *range(len(ids), last + 1)]
                    looks[READING].append(Look(len(rows), last, seen, [word]))
            ids += asking + reply
            segments += [-number if blind else number] * length
            positions += range(start, start + length)
            weight = WEIGHTS.get(question.kind, 1.0) if step >= WEIGHTED_FROM else 1.0
            learn += [0.0] * len(asking) + [weight / len(reply)] * len(reply)
        rows.append((ids, segments, positions, learn))
    ids = padded([row[0] for row in rows], tokenizer.pad_token_id)
    segments = padded([row[1] for row in rows], QUESTIONS + 1)
    length = ids.shape[1]
    later = padded([row[2] for row in rows], 0)[:, : length - len(front)]
    here, there = segments[:, :, None], segments[:, None, :]
    seen = (here == there) | (there == 0) & ((here >= 0) | (torch.arange(length) < role))
    return Batch(
        ids=ids,
        positions=torch.cat([front_positions[:, None].expand(3, pictures, -1), later.expand(3, -1, -1)], dim=-1),
        mask=(seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None],
        learn=padded([row[3] for row in rows], 0.0),
        pixels=processor([picture(scene) for scene in scenes], return_tensors="pt"),
        looks=looks,
    )


def shape_sought(question: Question) -> str | None:
    """The shape by which a question finds the thing that it asks about."""
    words = re.findall(r"\w+", question.text)
    return next((shape for shape in SHAPES if shape in words), None) if question.kind in ("colour", "place") else None


def positions_of_front(length: int, role: int) -> list[list[int]]:
    """Rows for time, height and width, as `get_rope_index` gives them (a test holds them against it)."""
    side, text = SIDE // PATCH // MERGE, list(range(role + 1))
    start, last = role + 1, role + 1 + side
    rows = [i // side for i in range(IMAGE_TOKENS)]
    columns = [i % side for i in range(IMAGE_TOKENS)]
    return [text + [start + at for at in image] + [last] for image in ([0] * IMAGE_TOKENS, rows, columns)]


def padded(rows: list[list], value) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def blind_prompt(rng: random.Random) -> str:
    """A prompt without a picture: a question, or words."""
    if rng.random() < 0.7:
        return rng.choice(questions(draw_scene(rng), rng)).text
    words = rng.choices([*OTHER_WORDS, *COLOURS, "zzz"], k=rng.randint(1, 6))
    return " ".join(words) + rng.choice(("", ".", "?", "!"))


def contents(scene) -> torch.Tensor:
    """Shape and colour of the thing in each image token's cell, counted from 1, 0 where it is empty: `[tokens, 2]`."""
    side = SIDE // PATCH // MERGE
    found = torch.zeros(side, side, 2, dtype=torch.long)
    for thing in scene.things:
        rows, columns = (slice(at * side // GRID, (at + 1) * side // GRID) for at in (thing.row, thing.column))
        found[rows, columns] = torch.tensor([1 + SHAPES.index(thing.shape), 1 + list(COLOURS).index(thing.colour)])
    return found.flatten(0, 1)
