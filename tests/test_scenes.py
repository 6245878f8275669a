"""Generated scenes: one right answer to each question, held-out ones apart, and the training batches made of them."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pop_core import scenes
from pop_core.scenes import COLOURS, KINDS, PLACES, SHAPES, Scene, Thing

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import shapes_batches
import shapes_model
import train_vl
import training

WHITE = (255, 255, 255)


def scene(*things: tuple[str, str, str]) -> Scene:
    return Scene(tuple(Thing(*thing, 0.5, 0.5, 0.5) for thing in things), WHITE)


THREE = scene(("red", "circle", "top left"), ("blue", "square", "top right"), ("red", "cross", "bottom"))


def answers(of: Scene) -> dict[str, str]:
    """Every wording that some seed gives, with its answer."""
    return {q.text: q.answer for seed in range(200) for q in scenes.questions(of, random.Random(seed))}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("what do you see?", "red circle top left, blue square top right, red cross bottom"),
        ("how many shapes are there?", "three"),
        ("how many crosses are there?", "one"),
        ("how many triangles?", "none"),
        ("how many are red?", "two"),
        ("what colour is the square?", "blue"),
        ("what shape is the blue one?", "square"),
        ("where is the cross?", "bottom"),
        ("where is the blue one?", "top right"),
        ("what is at the top left?", "red circle"),
        ("what is in the middle?", "nothing"),
        ("what is above the blue square?", "nothing"),
        ("what is right of the red cross?", "blue square"),
        ("what is left of the red cross?", "red circle"),
    ],
)
def test_answers(text, answer):
    assert answers(THREE)[text] == answer


def test_no_question_has_two_answers():
    """Of two red things neither is "the red one", and nothing is right of the circle without saying which of two."""
    asked = answers(THREE)
    assert not {"what shape is the red one?", "where is the red one?", "what is right of the red circle?"} & set(asked)
    for seed in range(300):
        rng = random.Random(seed)
        some = scenes.draw_scene(rng)
        seen = {}
        for question in scenes.questions(some, rng):
            assert seen.setdefault(question.text, question.answer) == question.answer


def test_of_two_circles_neither_is_the_circle():
    two = scene(("red", "circle", "top left"), ("blue", "circle", "bottom"), ("blue", "square", "top"))
    asked = answers(two)
    assert not {text for text in asked if "the circle" in text or "has the circle" in text}
    assert not {text for text in asked if "the blue one" in text or text == "what shape is blue?"}
    assert asked["what colour is the square?"] == "blue" and asked["where is the red one?"] == "top left"


def test_held_out_scenes_are_never_drawn_for_training():
    trained = [scenes.draw_scene(random.Random(f"t {seed}")) for seed in range(500)]
    held_out = scenes.held_out_scenes(100)
    assert not any(some.held_out for some in trained) and all(some.held_out for some in held_out)
    assert scenes.held_out_scenes(5) == held_out[:5]
    share = sum(scenes.draw_scene(random.Random(seed), held_out=None).held_out for seed in range(2000)) / 2000
    assert 0.09 < share < 0.16


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_picture_shows_the_colour_in_its_cell_alone(shape, place):
    row, column = divmod(PLACES.index(place), 3)
    pixels = np.asarray(scenes.picture(scene(("green", shape, place)), 96)).astype(int)
    painted = (np.abs(pixels - COLOURS["green"]).sum(-1) < 10).nonzero()
    assert len(painted[0]) > 80
    assert set(painted[0] // 32) == {row} and set(painted[1] // 32) == {column}


def test_every_kind_is_asked():
    found = {question.kind for _, asked in scenes.held_out_questions(20) for question in asked}
    assert found == set(KINDS)
    for _, asked in scenes.held_out_questions(20):
        assert len({question.kind for question in asked}) == len(asked)


@pytest.fixture(scope="module")
def trainer():
    tokenizer = shapes_model.make_tokenizer()
    return tokenizer, shapes_model.image_processor(), shapes_model.new_model(tokenizer).eval()


def test_positions_in_front_of_the_questions_are_the_models_own(trainer):
    tokenizer, _, model = trainer
    front, _ = shapes_batches.layout(tokenizer)
    ids, side = torch.tensor([front]), shapes_model.SIDE // shapes_model.PATCH
    kinds = (ids == model.config.image_token_id).int()
    expected = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor([[1, side, side]]))
    role = front.index(tokenizer.convert_tokens_to_ids("<|vision_start|>"))
    assert torch.equal(expected[0][:, 0], torch.tensor(shapes_batches.positions_of_front(len(front), role)))


def test_a_packed_question_is_read_as_if_it_were_alone(trainer):
    """The loss of a batch is the mean over its answers, each read by the stock forward with its own prompt."""
    tokenizer, processor, model = trainer
    with torch.no_grad():
        loss, _ = train_vl.answer_losses(model, shapes_batches.batch(tokenizer, processor, random.Random(5), 1, step=0))
        alone = [_stock_loss(trainer, *question) for question in packed(5)]
    assert loss.item() == pytest.approx(sum(alone) / len(alone), abs=1e-5)


def packed(seed: int):
    """(picture or None, question, answer) as `batch` draws them."""
    rng = random.Random(seed)
    some = scenes.draw_scene(rng)
    asked = scenes.questions(some, rng)
    whole = next(q for q in asked if q.kind == "describe")
    for question in [whole, *[q for q in asked if q is not whole][: shapes_batches.QUESTIONS - 2]]:
        yield scenes.picture(some), question.text, question.answer
    yield None, shapes_batches.blind_prompt(rng), scenes.NO_PICTURE


def _stock_loss(trainer, image, text, answer) -> float:
    tokenizer, processor, model = trainer
    parts = [{"type": "image"}] * (image is not None) + [{"type": "text", "text": text}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    rendered = rendered.replace("<|image_pad|>", "<|image_pad|>" * shapes_model.IMAGE_TOKENS)
    prompt = tokenizer(rendered, add_special_tokens=False).input_ids
    reply = [*tokenizer(" " + answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    ids = torch.tensor([prompt + reply])
    seen = {}
    if image is not None:
        seen = dict(processor([image], return_tensors="pt"))
        seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    model.model.rope_deltas = None
    logits = model(ids, **seen).logits[0, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(reply)).item()


def test_a_guide_tells_how_much_of_the_stock_attention_misses_the_shape(trainer):
    """Of the word's to image tokens, and of all of the attention from where the answer begins to the word."""
    tokenizer, processor, model = trainer
    part = shapes_batches.batch(tokenizer, processor, random.Random(5), 2, step=shapes_batches.READING_FROM)
    layers, found = model.model.language_model.layers, {}
    hooks = [
        layers[at].self_attn.register_forward_hook(lambda _, inputs, output, at=at: found.update({at: output[1]}))
        for at, _ in part.looks
    ]
    model.set_attn_implementation("eager")  # the one that tells its weights, and adds the mask
    eager = replace(part, mask=torch.where(part.mask, 0.0, -torch.inf))
    with torch.no_grad():
        guided, unguided = (train_vl.answer_losses(model, some)[0] for some in (eager, replace(eager, looks={})))
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation("sdpa")
    looking, reading = [], []
    for look, read in zip(*part.looks.values(), strict=True):
        assert tokenizer.decode(part.ids[look.row, look.slot]).strip() in SHAPES
        on_image = found[0][look.row, shapes_batches.LOOKING[1], look.slot] * (
            part.ids[look.row] == model.config.image_token_id
        )
        assert 1 < len(look.wanted) < len(on_image.nonzero())
        looking.append(-(on_image[look.wanted].sum() / on_image.sum()).log())
        assert part.learn[read.row, read.slot] == 0 < part.learn[read.row, read.slot + 1]
        reading.append(-found[1][read.row, shapes_batches.READING[1], read.slot, look.slot].log())
    assert len(looking) > 1
    missed = torch.stack(looking).mean() + torch.stack(reading).mean()
    assert (guided - unguided).item() == pytest.approx(missed.item(), abs=1e-5)


def test_the_vision_tower_is_taught_what_is_in_each_cell():
    found = shapes_batches.contents(THREE).view(6, 6, 2)
    red, blue = (1 + list(COLOURS).index(name) for name in ("red", "blue"))
    assert found[0:2, 0:2].flatten(0, 1).unique(dim=0).tolist() == [[1 + SHAPES.index("circle"), red]]
    assert found[0:2, 4:6].flatten(0, 1).unique(dim=0).tolist() == [[1 + SHAPES.index("square"), blue]]
    assert found[4:6, 2:4].flatten(0, 1).unique(dim=0).tolist() == [[1 + SHAPES.index("cross"), red]]
    assert (found.sum(-1) > 0).sum() == 12


def test_orthogonal_updates_have_singular_values_near_one():
    for shape in ((24, 60), (60, 24)):
        values = torch.linalg.svdvals(training.orthogonal(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("text", ["What COLOR is the circle?", "how many shapes are there?", "what is left of it?"])
def test_the_tokenizer_knows_the_words_of_the_questions(trainer, text):
    tokenizer = trainer[0]
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids
    assert tokenizer.unk_token_id in tokenizer("what about photosynthesis?").input_ids
    again = tokenizer.decode(tokenizer("red circle top left, blue square middle").input_ids)
    assert again == "red circle top left, blue square middle"
