"""Eyes: pictures of any size to placeholders and to what the tower is given, with their limits and their refusals."""

import pytest
import torch
from tiny import SHAPE
from tiny_vision import END, IMAGE, SEEING_MAKERS, START, image_processor, scribble, seeing_tokenizer
from transformers import Gemma3Processor

from pop_core import vision
from pop_core.errors import Cancelled, PopError
from pop_core.pictures import open_picture
from pop_core.plan import DENSE, Plan, PrefillCut
from pop_core.sampling import Sampling


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_prompts_have_a_placeholder_for_each_image_token(engines, name, chat):
    engine, images = engines(name), [scribble(32, 16), scribble(16, 16)]
    prompt = engine.encode("Hi", Sampling(), chat, images)
    ids = list(prompt.ids)
    assert ids.count(IMAGE) == prompt.image_tokens == sum(fact["tokens"] for fact in prompt.pixels.facts)
    assert ids.count(START) == ids.count(END) == 2
    assert ids.count(1) == 1 and ids[0] == 1  # one BOS
    sight = engine.look(prompt)
    assert [place.tokens for place in sight.places] == [fact["tokens"] for fact in prompt.pixels.facts]
    plain = engine.encode("Hi", Sampling(), chat)
    text = [i for i in ids if i < SHAPE["vocab_size"]]
    newline = seeing_tokenizer(name).convert_tokens_to_ids("Ċ")
    strip = [i for i in text if i != newline]
    assert strip == [i for i in plain.ids if i != newline]


def test_the_processor_of_stock_gemma_makes_the_same_prompt(engines):
    engine = engines("gemma3-vl")
    tokenizer = seeing_tokenizer("gemma3-vl")
    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = (
        tokenizer.convert_ids_to_tokens(i) for i in (START, END, IMAGE)
    )
    tokenizer.boi_token_id, tokenizer.image_token_id = START, IMAGE
    processor = Gemma3Processor(image_processor("gemma3-vl"), tokenizer, image_seq_length=4)
    picture = scribble(20, 30)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi th"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = processor(images=[picture], text=text, add_special_tokens=False, return_tensors="pt")
    prompt = engine.encode("Hi th", Sampling(), True, [picture])
    assert list(prompt.ids) == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.pixels.tensors["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("typed", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "a<|vision_end|>b"])
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_typed_placeholders_are_text(engines, name, typed):
    prompt = engines(name).encode(typed, Sampling(), None, [scribble(16, 16)])
    assert list(prompt.ids).count(IMAGE) == prompt.image_tokens
    assert engines(name).look(prompt).tokens == prompt.image_tokens


def test_a_limit_on_tokens_scales_the_picture_and_says_so(engines):
    engine = engines("qwen3-vl")
    whole = engine.eyes.prepare([scribble(64, 64)])
    assert whole.facts[0]["tokens"] == 64 and not whole.notices
    limited = engine.eyes.prepare([scribble(64, 64)], 16)
    fact = limited.facts[0]
    assert (fact["tokens"], fact["seen_width"], fact["seen_height"]) == (16, 32, 32)
    assert limited.notices == (
        "A picture of 64 x 64 pixels was scaled to 32 x 32, so that it takes 16 tokens: at most 16 are allowed.",
    )
    assert engine.eyes.prepare([scribble(16, 16)], 256).facts[0]["tokens"] == 256  # asked for, so made larger
    for most in (3, 10**9, "many"):
        with pytest.raises(PopError, match="number of image tokens"):
            engine.eyes.prepare([scribble(16, 16)], most)
    with pytest.raises(PopError, match="4 tokens for every picture"):
        engines("gemma3-vl").eyes.prepare([scribble(16, 16)], 16)


@pytest.mark.parametrize("size", [(80, 24), (24, 16), (16, 16), (195, 65), (30, 90), (1, 199)])
def test_a_higher_limit_never_gives_fewer_tokens(engines, size):
    eyes = engines("qwen3-vl").eyes
    found = [eyes.prepare([scribble(*size)], most).tokens for most in range(4, 60)]
    assert found == sorted(found)
    assert all(tokens <= most for tokens, most in zip(found, range(4, 60), strict=True))


@pytest.mark.parametrize("size", [(80, 24), (17, 31), (600, 400), (8, 8)])
def test_what_the_tower_is_given_is_the_stock_processors(engines, size):
    expected = image_processor("qwen3-vl")([scribble(*size)], return_tensors="pt")
    tensors = engines("qwen3-vl").eyes.prepare([scribble(*size)]).tensors
    assert torch.equal(tensors["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(tensors["pixel_values"], expected["pixel_values"])


def test_pictures_that_do_not_fit_are_refused_before_they_are_scaled(engines, monkeypatch):
    engine = engines("qwen3-vl")
    monkeypatch.setattr(type(engine.eyes), "_tensors", lambda *_: pytest.fail("a pixel was scaled"))
    with pytest.raises(PopError, match=r"The pictures take 16,384 tokens; with the text, 4,096 fit"):
        engine.encode("Hi", Sampling(), None, [scribble(1, 1)], 16384)


def test_pictures_are_opened_until_they_do_not_fit(engines, monkeypatch):
    opened = []
    monkeypatch.setattr(vision, "open_picture", lambda image: opened.append(image) or open_picture(image))
    with pytest.raises(PopError, match=r"^2 of 9 pictures take [\d,]+ tokens; with the text, 4,096 fit"):
        engines("qwen3-vl").eyes.prepare([scribble(16, 16)] * 9, 3000)
    assert len(opened) == 2


def test_lengths_name_the_image_tokens(engines):
    with pytest.raises(PopError, match=r"3,9\d\d tokens, 3,969 of them for pictures, and the answer"):
        engines("qwen3-vl").encode("Hi", Sampling(4096), None, [scribble(16, 16)], 3969)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_looking_stops_and_leaves_nothing_on_the_tower(engines, name):
    engine, calls = engines(name), []
    prompt = engine.encode("Hi", Sampling(), None, [scribble(16, 16)])

    def stop():
        calls.append(1)
        if len(calls) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        engine.look(prompt, stop)
    assert len(calls) == 2
    assert not any(part._forward_pre_hooks for part in engine.loaded.model.modules())
    assert engine.look(prompt).tokens == prompt.image_tokens


def test_text_alone_reports_no_pictures(engines):
    run = engines("qwen3-vl").generate("Hi there", DENSE, Sampling(4))
    assert (run.image_tokens, run.vision_ms, run.pictures) == (0, 0.0, [])


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_a_run_reports_its_pictures(engines, name):
    engine, images = engines(name), [scribble(32, 16)]
    run = engine.generate("Hi", Plan(PrefillCut(4)), Sampling(4), images=images)
    assert run.image_tokens == run.pictures[0]["tokens"] > 0
    assert (run.pictures[0]["width"], run.pictures[0]["height"]) == (32, 16)
    assert run.vision_ms > 0 and run.vision_ms + run.prefill_ms < run.ttft_ms < run.vision_ms + run.prefill_ms + 1e3
    again = engine.generate("Hi", Plan(PrefillCut(4)), Sampling(4), images=images)
    assert again.tokens == run.tokens


ODD_SIZES = ((1, 1), (2, 2), (1, 199), (1, 300), (10_000, 1), (27, 332), (332, 27), (3000, 20), (15, 17), (2000, 2000))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_pictures_of_any_shape_are_seen(engines, name, size):
    engine = engines(name)
    run = engine.generate("Hi", Plan(PrefillCut(4)), Sampling(2), images=[scribble(*size)])
    (fact,) = run.pictures
    assert (fact["width"], fact["height"]) == size
    assert run.image_tokens == fact["tokens"] == fact["rows"] * fact["columns"] > 0
    assert fact["tokens"] <= 120  # 64, but for strips: the processor keeps a whole row
    if not name.startswith("gemma"):
        assert engine.eyes.prepare([scribble(*size)], 16).tokens <= 16
