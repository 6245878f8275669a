"""The text of the small mixture-of-experts model: a seeded grammar of nine kinds of documents, all of our own making.

The law that makes evaluation honest: the facts of a document (who put what where, which numbers are added) are drawn
by `Pen.combination`, and a combination belongs to training or to the held-out text by a hash of its words. So what is
asked of held-out text was never said in training, in any kind of document, and has to be read or reckoned.
"""

import random
import zlib
from dataclasses import dataclass, field

from moe_words import (
    ANIMALS,
    COLOURS,
    DEEDS,
    GOODS,
    HOURS,
    JOBS,
    MONTHS,
    NAMES,
    ORDER,
    PLACES,
    SAYINGS,
    SEASONS,
    SPOTS,
    SURNAMES,
    THINGS,
    TOWNS,
    WEATHER,
    WEEKDAYS,
    WOMEN,
)

HELD_OUT_ONE_IN = 8
TRIES = 200


class NoCombination(Exception):
    """The document that was begun cannot be finished on this side of the split."""


@dataclass(frozen=True)
class Document:
    """A text and its answers: `text[start:end]` is what has to follow `text[:start]`."""

    kind: str
    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass
class Pen:
    """Writes one document, draws what it is about, and remembers where its answers are."""

    rng: random.Random
    held_out: bool
    text: str = ""
    answers: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.inline = self.rng.random() < 0.5  # questions in the running text, or marked as such

    def one(self, options):
        return self.rng.choice(options)

    def some(self, options, count: int) -> list:
        return self.rng.sample(list(options), count)

    def ask_some(self, questions: list[tuple[str, str]], least: int, most: int) -> None:
        for question in self.some(questions, min(self.number(least, most), len(questions))):
            self.ask(*question)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)

    def combination(self, draw):
        """What `draw()` returns, drawn again until it belongs to this pen's side of the split.

        Raises `NoCombination` when it never does: a person and a thing may have no held-out spot left.
        """
        for _ in range(TRIES):
            if is_held_out(drawn := draw()) == self.held_out:
                return drawn
        raise NoCombination

    def addends(self, least: int, most: int, step: int | None = None) -> tuple[int, int]:
        """Two numbers, the second of them `step` where that is given.

        One sum is one fact, whichever way it is asked: 3 + 4, 4 + 3, 7 - 4.
        """
        drawn = {}

        def fact() -> tuple[int, int]:
            drawn["pair"] = self.number(least, most), step or self.number(least, most)
            return tuple(sorted(drawn["pair"]))

        self.combination(fact)
        return drawn["pair"]

    def write(self, text: str) -> None:
        self.text += text

    def sentence(self, *variants: str) -> None:
        """One of these, after a space where the line has begun."""
        self.write((" " if self.text and not self.text.endswith("\n") else "") + self.one(variants))

    def answer(self, text: str) -> None:
        """A text that a reader of what is written so far can know."""
        self.answers.append((len(self.text), len(self.text) + len(text)))
        self.write(text)

    def ask(self, question: str, answer: str) -> None:
        self.write(f"\n{question}" if self.inline else f"\nQuestion: {question}\nAnswer:")
        self.answer(f" {answer}")


def is_held_out(combination: tuple) -> bool:
    """A hash that is the same in every process, unlike Python's own."""
    return zlib.crc32(" ".join(map(str, combination)).encode()) % HELD_OUT_ONE_IN == 0


def she(name: str) -> str:
    return "she" if name in WOMEN else "he"


def her(name: str) -> str:
    return "her" if name in WOMEN else "him"


def an(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def story(pen: Pen) -> None:
    """Things are put, moved and given, people come and go; the questions are about how it ended."""
    long = pen.chance(0.2)
    people = pen.some(NAMES, pen.number(2, 4))
    things = [f"{pen.one(COLOURS)} {noun}" for noun in pen.some(THINGS, pen.number(5, 9) if long else pen.number(2, 5))]
    where, whose, mover, at = {}, {}, {}, {}
    weather, hour, season = pen.one(WEATHER), pen.one(HOURS), pen.one(SEASONS)
    pen.sentence(
        f"It was a {weather} {hour} in {season}.",
        f"One {weather} {hour}, {listed(people)} were at home.",
        f"{listed(people)} were together on a {weather} {hour}.",
        f"This is a story about {listed(people)}.",
    )
    fillers = 0.9 if long else pen.one((0.1, 0.1, 0.3, 0.6))

    def put(thing: str) -> None:
        free = [spot for spot in SPOTS if spot not in where.values()]  # "What is in the box?" has one answer
        who, _, spot = pen.combination(lambda: (pen.one(people), thing.split()[1], pen.one(free)))
        if thing in where or thing in whose:
            pen.sentence(
                f"Later, {who} took the {thing} and put it {spot}.",
                f"Then {who} moved the {thing}, and now it was {spot}.",
                f"After that, {who} found the {thing} and hid it {spot}.",
            )
        else:
            pen.sentence(
                f"{who} put the {thing} {spot}.",
                f"{who} had {an(thing)} and left it {spot}.",
                f"{who} took the {thing} and laid it {spot}.",
                f"There was {an(thing)}, and {who} put it {spot}.",
                f"{who} hid the {thing} {spot}.",
            )
        whose.pop(thing, None)
        where[thing], mover[thing] = spot, who

    def give(thing: str) -> None:
        giver, taker = pen.some(people, 2)
        pen.sentence(
            f"{giver} gave the {thing} to {taker}.",
            f"{giver} wanted {taker} to have the {thing}, so {she(giver)} gave it to {her(taker)}.",
            f"Then {taker} got the {thing} from {giver}.",
        )
        where.pop(thing, None)
        whose[thing] = taker

    def go() -> None:
        who, place = pen.combination(lambda: (pen.one(people), pen.one(PLACES)))
        pen.sentence(f"{who} went to the {place}.", f"Then {who} walked to the {place}.", f"{who} ran to the {place}.")
        at[who] = place

    for thing in things:
        give(thing) if pen.chance(0.2) else put(thing)
        if pen.chance(fillers):
            pen.sentence(*SAYINGS, *(deed.format(pen.one(people)) for deed in DEEDS))
        if pen.chance(0.3):
            go()
    for thing in pen.some(things, pen.number(0, 2)):
        give(thing) if pen.chance(0.3) else put(thing)
        if pen.chance(fillers):
            pen.sentence(*SAYINGS)

    questions = [(f"Where is the {thing}?", f"The {thing} is {spot}.") for thing, spot in where.items()]
    questions += [(f"Who has the {thing}?", f"The {thing} is with {who}.") for thing, who in whose.items()]
    more = [(f"Where is {who}?", f"{who} is in the {place}.") for who, place in at.items()]
    more += [(f"Who put the {thing} {spot}?", f"{mover[thing]} did.") for thing, spot in where.items()]
    more += [(f"What is {spot}?", f"The {thing} is {spot}.") for thing, spot in where.items()]
    for colour, noun in map(str.split, things):
        more.append((f"What colour is the {noun}?", f"The {noun} is {colour}."))
    pen.ask_some(questions, 3, 6)
    pen.ask_some(more, 3, 5)


def tale(pen: Pen) -> None:
    """Somebody wants something, somebody helps; the names, the things and the pronouns stay the same."""
    name, thing, place = pen.combination(lambda: (pen.one(NAMES), pen.one(THINGS), pen.one(PLACES)))
    animal, other, town, job = pen.one(ANIMALS), pen.one([n for n in NAMES if n != name]), pen.one(TOWNS), pen.one(JOBS)
    wanted = f"{pen.one(COLOURS)} {thing}"
    subject, thought = (
        she(name).capitalize(),
        pen.one(("dreamed of it", "thought of it", "spoke of it", "wished for it")),
    )
    her_own = "her" if name in WOMEN else "his"
    pen.sentence(
        f"Once upon a time there was a young {job} called {name}, who lived in {town}.",
        f"Long ago, {name} lived in {town} and worked there as {an(job)}.",
        f"In {town} there lived a {job} whose name was {name}.",
    )
    pen.sentence(
        f"{subject} wanted {an(wanted)} more than anything.",
        f"More than anything, {name} wanted {an(wanted)}.",
        f"{name} wanted only one thing, and that was {an(wanted)}.",
    )
    pen.sentence(f"Every {pen.one(HOURS)} {she(name)} {thought}.", f"{subject} {thought} day and night.", *SAYINGS)
    pen.sentence(
        f"One {pen.one(WEATHER)} day {name} went to the {place}, but there was no {thing}.",
        f"So {she(name)} set out and looked in the {place}, but found nothing.",
        f"On a {pen.one(WEATHER)} {pen.one(WEEKDAYS)} {she(name)} walked to the {place} and looked everywhere.",
    )
    pen.sentence(
        f'There {she(name)} met {an(animal)}. "Why are you sad?" asked the {animal}.',
        f'There sat {an(animal)}. "What are you looking for?" asked the {animal}.',
    )
    pen.sentence(f'"I am looking for {an(wanted)}," said {name}.', f'"I want {an(wanted)}," {she(name)} said.')
    pen.sentence(
        f'"{other} has one," said the {animal}. "I will show you the way."',
        f'"Then you must ask {other}," said the {animal}, "and I will come with you."',
    )
    pen.sentence(
        f"Together they went to {other}, and {other} gave {her(name)} the {wanted}.",
        f"They found {other}, who was glad to give {her(name)} the {wanted}.",
    )
    pen.sentence(
        f"{name} thanked the {animal} and went home happy.",
        f"From that day on, {name} and the {animal} were friends.",
        f"{subject} carried it home to {town} and was happy for the rest of {her_own} life.",
    )
    questions = [
        (f"What did {name} want?", f"{subject} wanted {an(wanted)}."),
        (f"Where did {name} look?", f"{subject} looked in the {place}."),
        (f"Who showed {name} the way?", f"The {animal} showed {her(name)} the way."),
        (f"Who had the {thing}?", f"{other} had the {thing}."),
        (f"Where did {name} live?", f"{subject} lived in {town}."),
        (f"What was the work of {name}?", f"{name} was {an(job)}."),
    ]
    pen.ask_some(questions, 4, 6)


def sums(pen: Pen) -> None:
    """Additions and subtractions up to 80, in signs, in words, and about things."""
    form = pen.one(("signs", "words", "things"))
    most = pen.one((10, 20, 40))
    for _ in range(pen.number(3, 7)):
        a, b = pen.addends(1, most)
        if form == "signs":
            less = pen.chance(0.4)
            pen.write(f"{a + b} - {a} =" if less else f"{a} + {b} =")
            pen.answer(f" {b}" if less else f" {a + b}")
        elif form == "words":
            less = pen.chance(0.4)
            pen.write(f"What is {a + b} minus {a}?" if less else f"What is {a} plus {b}?")
            pen.answer(f" {a + b} minus {a} is {b}." if less else f" {a} plus {b} is {a + b}.")
        else:
            name, goods, other = pen.one(NAMES), pen.one(GOODS), pen.one(NAMES)
            more = pen.one((f"{other} brings {b} more.", f"Then {other} finds {b} more.", f"{other} adds {b}."))
            pen.write(f"{name} has {a} {goods}. {more} How many {goods} are there?")
            pen.answer(f" There are {a + b} {goods}.")
        pen.write("\n")
    pen.text = pen.text.rstrip("\n")


def records(pen: Pen) -> None:
    """Entries in a fixed format, and questions about some of their fields."""
    table, entries = pen.chance(0.4), {}
    for _ in range(pen.number(2, 5)):
        first, town, job = pen.combination(lambda: (pen.one(NAMES), pen.one(TOWNS), pen.one(JOBS)))
        entries[first] = (pen.one(SURNAMES), town, job, pen.number(20, 69))
    if table:
        pen.write("name | town | job | age")
    for number, (first, (last, town, job, age)) in enumerate(entries.items(), pen.number(1, 90)):
        if table:
            pen.write(f"\n{first} {last} | {town} | {job} | {age}")
        else:
            pen.write("\n" * 2 * bool(pen.text))
            pen.write(f"Record {number}\nname: {first} {last}\ntown: {town}\njob: {job}\nage: {age}")
    pen.write("\n")
    questions = []
    for first, (last, town, job, age) in entries.items():
        questions += [
            (f"Where does {first} {last} live?", f"{first} {last} lives in {town}."),
            (f"What is the job of {first} {last}?", f"{first} {last} is {an(job)}."),
            (f"How old is {first} {last}?", f"{first} {last} is {age} years old."),
            (f"What is the last name of {first}?", f"The last name of {first} is {last}."),
        ]
    pen.ask_some(questions, 4, 6)


def functions(pen: Pen) -> None:
    """Tiny Python functions, and what they return."""
    for index in range(pen.number(1, 3)):
        kind = pen.one(("add", "subtract", "greet", "place", "first", "last", "count"))
        pen.write("\n\n" * bool(index))
        argument = pen.one(("x", "n", "value", "number"))
        if kind in ("add", "subtract"):
            step = pen.number(1, 20)
            sign = "+" if kind == "add" else "-"
            name = f"{kind}_{step}"
            pen.write(f"def {name}({argument}):\n    return {argument} {sign} {step}\n")
            calls = []
            for _ in range(pen.number(2, 4)):
                other, _ = pen.addends(1, 40, step)
                calls.append((f"{other}", f"{other + step}") if kind == "add" else (f"{other + step}", f"{other}"))
        elif kind == "greet":
            word = pen.one(("Hello", "Goodbye", "Welcome", "Thank you", "Good night"))
            name = "say_" + word.lower().replace(" ", "_")
            pen.write(f'def {name}(name):\n    return "{word}, " + name\n')
            people = [pen.combination(lambda word=word: (word, pen.one(NAMES)))[1] for _ in range(2)]
            calls = [(f'"{person}"', f"'{word}, {person}'") for person in people]
        elif kind == "place":
            noun = pen.one(THINGS)
            name = f"{noun}_is"
            pen.write(f'def {name}(place):\n    return "The {noun} is " + place\n')
            spots = [pen.combination(lambda noun=noun: (noun, pen.one(SPOTS)))[1] for _ in range(2)]
            calls = [(f'"{spot}"', f"'The {noun} is {spot}'") for spot in spots]
        else:
            name = {"first": "first_item", "last": "last_item", "count": "count_items"}[kind]
            body = {"first": "items[0]", "last": "items[-1]", "count": "len(items)"}[kind]
            pen.write(f"def {name}(items):\n    return {body}\n")
            calls = []
            for _ in range(pen.number(2, 3)):
                items = pen.combination(lambda: tuple(pen.some(THINGS, pen.number(2, 5))))
                result = {"first": f"'{items[0]}'", "last": f"'{items[-1]}'", "count": f"{len(items)}"}[kind]
                calls.append(("[" + ", ".join(f'"{item}"' for item in items) + "]", result))
        for arguments, result in calls:
            pen.write(f"\n>>> {name}({arguments})\n")
            pen.answer(result)


def dialogue(pen: Pen) -> None:
    """Two people talk about where they were and what they saw, line by line."""
    asker, teller = pen.some(NAMES, 2)
    companion = pen.one([n for n in NAMES if n not in (asker, teller)])
    day = pen.one(WEEKDAYS)
    _, place, thing = pen.combination(lambda: (teller, pen.one(PLACES), pen.one(THINGS)))
    seen, spot = f"{pen.one(COLOURS)} {thing}", pen.one(SPOTS)
    lines = [
        (asker, (f"Good {pen.one(HOURS)}, {teller}. How are you?", f"Hello, {teller}! It is good to see you.")),
        (teller, (f"I am well, {asker}, thank you.", f"Hello, {asker}. I am a little tired.", f"Very well, {asker}.")),
        (asker, (f"Where were you on {day}?", f"I did not see you on {day}. Where did you go?")),
        (
            teller,
            (
                f"On {day} I went to the {place} with {companion}.",
                f"I was in the {place}, and {companion} came with me.",
                f"{companion} and I went to the {place}.",
            ),
        ),
        (asker, ("What did you do there?", "And what did you find?", "Was it nice?")),
        (
            teller,
            (
                f"We found {an(seen)} {spot}.",
                f"It was nice. I found {an(seen)} {spot}.",
                f"We looked around, and {spot} we found {an(seen)}.",
            ),
        ),
        (asker, ("Did you keep it?", f"What did you do with the {thing}?", "And then?")),
        (
            teller,
            (
                f"{companion} took it home.",
                f"I gave it to {companion}, who likes such things.",
                f"It belongs to {companion} now.",
            ),
        ),
        (asker, ("I would like to see it.", "How lucky!", "Next time I will come with you.", f"Goodbye, {teller}.")),
    ]
    pen.write("\n".join(f"{speaker}: {pen.one(words)}" for speaker, words in lines[pen.one((0, 0, 2)) :]))
    pen.write("\n")
    questions = [
        (f"Where did {teller} go on {day}?", f"{teller} went to the {place}."),
        (f"Who went with {teller}?", f"{companion} went with {teller}."),
        (f"What did {teller} find?", f"{teller} found {an(seen)}."),
        (f"Where was the {thing}?", f"It was {spot}."),
        (f"Who has the {thing} now?", f"{companion} has the {thing}."),
        (f"Who asked {teller}?", f"{asker} asked {teller}."),
    ]
    pen.ask_some(questions, 4, 6)


def dates(pen: Pen) -> None:
    """The calendar: the day before and after, and what somebody does on which day."""
    if pen.chance(0.5):
        for _ in range(pen.number(3, 6)):
            weekday, day, month = pen.combination(lambda: (pen.number(0, 6), pen.number(2, 27), pen.one(MONTHS)))
            step = pen.one((-1, 1))
            other = f"{WEEKDAYS[(weekday + step) % 7]}, {day + step} {month}."
            pen.sentence(f"Today is {WEEKDAYS[weekday]}, {day} {month}.")
            pen.write(" Tomorrow is" if step == 1 else " Yesterday was")
            pen.answer(f" {other}")
            pen.write("\n")
        pen.text = pen.text.rstrip("\n")
        return
    name, plans = pen.one(NAMES), {}
    start, count = pen.number(0, 6), pen.number(3, 6)
    pen.write(pen.one((f"This is the week of {name}.", f"{name} has a busy week.", f"The plan of {name}:")))
    for index in range(count):
        day = WEEKDAYS[(start + index) % 7]
        _, place = pen.combination(lambda day=day: (day, pen.one(PLACES)))
        if place not in plans.values():
            plans[day] = place
            pen.sentence(f"On {day} {she(name)} goes to the {place}.", f"On {day} {name} is in the {place}.")
    questions = [(f"Where is {name} on {day}?", f"On {day} {name} is in the {place}.") for day, place in plans.items()]
    questions += [(f"When is {name} in the {place}?", f"On {day}.") for day, place in plans.items()]
    pen.ask_some(questions, 4, 7)


def lists(pen: Pen) -> None:
    """Counting up and down, and shopping lists with questions about their lines."""
    if pen.chance(0.4):
        for _ in range(pen.number(2, 4)):
            start, step, count = pen.combination(lambda: (pen.number(1, 80), pen.one((1, 2, 5, 10)), pen.number(4, 8)))
            row = [start + step * index for index in range(count)]
            row = row[::-1] if pen.chance(0.3) else row
            by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
            pen.write(f"Count{by} from {row[0]} to {row[-1]}:")
            pen.answer(f" {', '.join(map(str, row))}.")
            pen.write("\n")
        pen.text = pen.text.rstrip("\n")
        return
    name = pen.one(NAMES)
    goods = [pen.combination(lambda: (name, pen.number(2, 30), pen.one(GOODS)))[1:] for _ in range(pen.number(3, 6))]
    lines = {good: count for count, good in goods}
    pen.write(pen.one((f"Shopping list of {name}:", f"{name} bought these things:", f"In the basket of {name}:")))
    for good, count in lines.items():
        pen.write(f"\n- {count} {good}")
    pen.write("\n")
    questions = [(f"How many {good} are on the list?", f"{count} {good}.") for good, count in lines.items()]
    questions += [
        (f"What is {place} on the list?", f"{count} {good}.")
        for place, (good, count) in zip((*ORDER[: len(lines)],), lines.items(), strict=False)
    ]
    questions.append(("What is last on the list?", f"{lines[good]} {good}."))
    pen.ask_some(questions, 4, 7)


def copies(pen: Pen) -> None:
    """The same few words over and over: what a reader needs most is to find what came after a word before."""
    row = pen.combination(lambda: tuple(pen.some(NAMES + THINGS + COLOURS + PLACES + GOODS + TOWNS, pen.number(2, 12))))
    pen.write("Again and again: " + " ".join(row))
    pen.answer((" " + " ".join(row)) * pen.number(1, max(1, 36 // len(row))))


KINDS = {
    "story": (story, 6),  # with the weight of its share of the documents
    "tale": (tale, 2),
    "sums": (sums, 6),
    "records": (records, 3),
    "functions": (functions, 3),
    "dialogue": (dialogue, 3),
    "dates": (dates, 4),
    "lists": (lists, 3),
    "copies": (copies, 1),
}


def document(rng: random.Random, held_out: bool = False, kind: str = "") -> Document:
    """One document, of a kind drawn by its weight unless one is named."""
    kind = kind or rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    while True:
        pen = Pen(rng, held_out)
        try:
            KINDS[kind][0](pen)
        except NoCombination:
            continue
        return Document(kind, pen.text, tuple(pen.answers))
