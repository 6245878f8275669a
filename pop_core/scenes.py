"""Pictures of coloured shapes on a grid, and the questions that one can ask about them.

What `shapes-vl` was trained on and is measured with. A scene is one to three objects in different cells of a
3 x 3 grid; each question has exactly one right answer, so that an answer is right when it is that text. One
arrangement in eight, chosen by a hash, is held out: training never sees it.
"""

import hashlib
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (40, 90, 220),
    "yellow": (245, 205, 40),
    "purple": (140, 60, 190),
    "orange": (250, 135, 30),
    "pink": (250, 150, 200),
    "black": (25, 25, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
NUMBERS = ("none", "one", "two", "three")
DIRECTIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
KINDS = ("describe", "count", "shape", "colour", "place", "content", "relation")
NO_PICTURE = "i see no picture"
GRID, HELD_OUT_SHARE, SIDE = 3, 8, 384  # SIDE: pixels of a drawn picture


@dataclass(frozen=True)
class Thing:
    """One object: names of its colour, shape and place; where in its cell it is and how large, from 0 to 1."""

    colour: str
    shape: str
    place: str
    right: float
    down: float
    size: float

    @property
    def row(self) -> int:
        return PLACES.index(self.place) // GRID

    @property
    def column(self) -> int:
        return PLACES.index(self.place) % GRID

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """`things` in reading order: row by row, from the left. background: RGB."""

    things: tuple[Thing, ...]
    background: tuple[int, int, int]

    @property
    def held_out(self) -> bool:
        text = ", ".join(f"{thing.name} {thing.place}" for thing in self.things)
        return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Question:
    """`kind` is one of `KINDS`; `answer` is the only right one."""

    kind: str
    text: str
    answer: str


def draw_scene(rng: random.Random, held_out: bool | None = False) -> Scene:
    """A scene drawn by lot, from the training arrangements, from the held-out ones or, with None, from all."""
    while True:
        places = sorted(rng.sample(range(len(PLACES)), rng.choice((1, 2, 2, 3, 3, 3))))
        things = tuple(
            Thing(
                rng.choice(list(COLOURS)), rng.choice(SHAPES), PLACES[place], rng.random(), rng.random(), rng.random()
            )
            for place in places
        )
        scene = Scene(things, tuple(rng.randint(225, 255) for _ in range(3)))
        if held_out in (None, scene.held_out):
            return scene


def held_out_scenes(number: int, seed: int = 2602):
    """The first `number` held-out scenes: the same ones in every run."""
    return [draw_scene(random.Random(f"{seed} {index}"), held_out=True) for index in range(number)]


def picture(scene: Scene, side: int = SIDE) -> Image.Image:
    """The scene as a square RGB picture of `side` pixels."""
    image = Image.new("RGB", (side, side), scene.background)
    pen, cell = ImageDraw.Draw(image), side / GRID
    for thing in scene.things:
        radius = cell * (0.27 + 0.13 * thing.size)
        slack = cell / 2 - radius
        x = (thing.column + 0.5) * cell + (2 * thing.right - 1) * slack
        y = (thing.row + 0.5) * cell + (2 * thing.down - 1) * slack
        colour = COLOURS[thing.colour]
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        elif thing.shape == "square":
            half = radius * 0.9
            pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
        elif thing.shape == "triangle":
            pen.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=colour)
        else:
            arm = radius / 3
            pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
            pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    return image


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """All that can be asked about a scene with one right answer, each in one of its wordings, in random order."""
    found = []

    def ask(kind, answer, *wordings):
        found.append(Question(kind, rng.choice(wordings), answer))

    things = scene.things
    whole = ", ".join(f"{thing.name} {thing.place}" for thing in things)
    ask("describe", whole, "describe the picture.", "what do you see?", "describe the image.")
    ask("count", NUMBERS[len(things)], "how many shapes are there?", "how many things are there?")
    for shape in SHAPES:
        those = [thing for thing in things if thing.shape == shape]
        if those or rng.random() < 0.3:
            ask("count", NUMBERS[len(those)], f"how many {plural(shape)} are there?", f"how many {plural(shape)}?")
        if len(those) == 1:
            (thing,) = those
            ask("colour", thing.colour, f"what colour is the {shape}?", f"which colour has the {shape}?")
            ask("place", thing.place, f"where is the {shape}?")
    for colour in COLOURS:
        those = [thing for thing in things if thing.colour == colour]
        if len(those) > 1 or rng.random() < (0.4 if those else 0.1):
            ask("count", NUMBERS[len(those)], f"how many {colour} shapes are there?", f"how many are {colour}?")
        if len(those) == 1:
            (thing,) = those
            ask("shape", thing.shape, f"what shape is the {colour} one?", f"what shape is {colour}?")
            ask("place", thing.place, f"where is the {colour} one?")
    for place in PLACES:
        there = [thing for thing in things if thing.place == place]
        if there or rng.random() < 0.15:
            answer = there[0].name if there else "nothing"
            ask("content", answer, f"what is at the {place}?", f"what is in the {place}?")
    names = [thing.name for thing in things]
    for thing in things:
        if names.count(thing.name) > 1:
            continue
        for words, (down, right) in DIRECTIONS.items():
            beyond = [
                other
                for other in things
                if (other.row - thing.row) * down > 0 or (other.column - thing.column) * right > 0
            ]
            if len(beyond) == 1 or (not beyond and rng.random() < 0.3):
                answer = beyond[0].name if beyond else "nothing"
                ask("relation", answer, f"what is {words} the {thing.name}?")
    rng.shuffle(found)
    return found


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def held_out_questions(number: int, seed: int = 2602):
    """(scene, questions) of the first `number` held-out scenes: one question of every kind that a scene allows."""
    for index, scene in enumerate(held_out_scenes(number, seed)):
        asked = questions(scene, random.Random(f"{seed} questions {index}"))
        yield scene, list({question.kind: question for question in asked}.values())
