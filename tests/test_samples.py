"""Samples: prompts with pictures are those of a run, their continuations what was asked for."""

import functools
import random
from dataclasses import replace

import pytest
from tiny_vision import END, IMAGE, SEEING_MAKERS, START, scribble

from pop_core import calibration, memory, scenes
from pop_core.engine import Engine
from pop_core.errors import NotEnoughMemory, PopError
from pop_core.loading import load_model
from pop_core.plan import DENSE
from pop_core.samples import Sample, image_samples, text_samples
from pop_core.sampling import Sampling

TEXT = "the cat and the dog walk in a wood and see what is this thing there " * 20


@functools.cache
def shapes() -> Engine:
    return Engine(load_model("shapes-vl"))


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_pieces_of_a_text_have_the_pictures_of_a_plain_prompt_in_front(engines, name):
    engine, images = engines(name), [scribble(16, 16), scribble(24, 16, seed=1)]
    with_images = text_samples(engine, TEXT, 20, 5, 4, images)
    without = text_samples(engine, TEXT, 20, 5, 4)
    piece = engine.loaded.tokenizer.decode(without[0].ids[1:20])
    plain = engine.encode(piece, Sampling(), False, images)
    assert plain.ids == with_images[0].ids[: with_images[0].prompt_tokens] == with_images[0].prompt.ids
    for sample, text in zip(with_images, without, strict=True):
        assert sample.image_tokens == plain.image_tokens == sample.ids.count(IMAGE)
        assert sample.ids[-24:] == text.ids[1:] and (sample.new_tokens, text.new_tokens) == (5, 5)
        assert engine.look(sample.prompt).tokens == sample.image_tokens and text.prompt is None


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_a_sample_of_a_picture_is_the_prompt_and_the_answer_with_its_end(engines, name):
    engine, image = engines(name), scribble(16, 16)
    (known,) = image_samples(engine, [((image,), "Hi", "a dog")], 30)
    prompt = engine.encode("Hi", Sampling(), None, [image])
    assert known.ids[: known.prompt_tokens] == prompt.ids and known.ids.count(START) == known.ids.count(END) == 1
    *answer, end = known.ids[known.prompt_tokens :]
    assert engine.loaded.tokenizer.decode(answer) == "a dog" and end in engine.ends
    (short,) = image_samples(engine, [((image,), "Hi", "a dog")], 3)
    assert short.ids == known.ids[: known.prompt_tokens + 3]


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_an_answer_that_is_not_known_is_the_greedy_one(engines, name):
    engine, image = engines(name), scribble(16, 16)
    (sample,) = image_samples(engine, [((image,), "Hi", None)], 6)
    run = engine.generate("Hi", DENSE, Sampling(6), images=[image])
    assert list(sample.ids[sample.prompt_tokens :][: len(run.tokens)]) == run.tokens
    assert (sample.new_tokens > len(run.tokens)) == (run.stop == "end")


def test_what_can_be_told_apart_has_another_digest():
    (one,), (other,) = (image_samples(shapes(), [((scribble(96, 96, s),), "Hi", "red")], 9) for s in (0, 1))
    assert one.ids == other.ids and one.digest() != other.digest()
    assert one.digest() == image_samples(shapes(), [((scribble(96, 96),), "Hi", "red")], 9)[0].digest()
    text = Sample((1, 2, 3), 2)
    assert text.digest(1) != text.digest(2) and text.digest() != replace(text, ids=(1, 2, 4)).digest()


def test_pictures_that_fill_the_memory_are_refused_after_the_first(monkeypatch):
    engine, seen = shapes(), []
    need = engine.encode("Hi", Sampling(), None, [scribble(96, 96)]).pixels.bytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * need)
    prompts = [((scribble(96, 96),), "Hi", "red")]
    assert len(image_samples(engine, prompts * 20, 9)) == 20
    with pytest.raises(NotEnoughMemory, match="what the eyes take of 21 prompts with pictures needs about"):
        image_samples(engine, prompts * 21, 9, lambda: seen.append(1))
    assert len(seen) == 1


def test_a_model_without_eyes_says_so(tiny):
    engine = Engine(load_model(tiny))
    for make in (
        lambda: image_samples(engine, calibration.scene_prompts(1), 4),
        lambda: text_samples(engine, TEXT, 20, 5, 2, [scribble(16, 16)]),
    ):
        with pytest.raises(PopError, match="reads text only and cannot see a picture"):
            make()


def test_scene_prompts_are_of_every_kind_never_held_out_and_always_the_same(monkeypatch):
    drawn, draw = [], scenes.draw_scene

    def seen(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(scenes, "draw_scene", seen)
    prompts = list(calibration.scene_prompts(40))
    assert len(drawn) == 40 and not any(scene.held_out for scene in drawn)
    kinds = set()
    for scene, (images, question, answer) in zip(drawn, prompts, strict=True):
        assert images[0].tobytes() == scenes.picture(scene).tobytes()
        # which questions there are is drawn too, but an answer that is right once is right always
        for seed in range(200):
            asked = scenes.questions(scene, random.Random(seed))
            if found := [q for q in asked if q.text == question]:
                assert found[0].answer == answer
                kinds.add(found[0].kind)
                break
        else:
            pytest.fail(f"nobody asks {question!r}")
    assert kinds == set(scenes.KINDS)
    assert [prompt[1:] for prompt in prompts] == [prompt[1:] for prompt in calibration.scene_prompts(40)]
    calibration.scene_prompt(0, held_out=True)
    assert drawn[-1].held_out


def test_what_a_seeing_model_is_calibrated_on(engines):
    """One that knows the text gets it and some pictures, one that does not gets more pictures."""
    knows, knows_not = calibration.Calibration(engines("qwen3-vl")), calibration.Calibration(shapes())
    assert len(knows.texts) == len(calibration.calibration_segments(engines("qwen3-vl").loaded.tokenizer)) > 4
    assert len(knows) == len(knows.texts) + calibration.SCENES and knows[0].prompt is None
    assert not knows_not.texts and len(knows_not) == calibration.SCENES_ALONE
    for made in (knows[len(knows) - 1], knows_not[0]):
        assert made.image_tokens > 0 and made.new_tokens > 1
    with pytest.raises(IndexError):
        knows[len(knows)]
    assert len(calibration.calibration_segments(shapes().loaded.tokenizer)) > 4  # only where something is in its place
