"""Prompts with pictures: parity with the stock forward, the laws of pruning, runs that do not disturb each other."""

import functools
from dataclasses import replace

import pytest
import torch
from laws import ROOM, gap
from tiny import SHAPE, random_ids
from tiny_vision import END, IMAGE, SEEING_MAKERS, START, image_processor, scribble, seeing_folder, seeing_tokenizer
from transformers import Gemma3Processor

from pop_core import gates
from pop_core.ablation import ablate, cut_divergence
from pop_core.decode import decode_step
from pop_core.divergence import divergence, mean
from pop_core.engine import Engine
from pop_core.errors import Cancelled, PopError
from pop_core.loading import load_model
from pop_core.plan import DENSE, ChannelPruning, Plan, PrefillCut
from pop_core.sampling import Sampling

TOLERANCE = 1e-4
PROMPTS = {
    "one picture": ("text", (24, 16), "text"),
    "picture first": ((16, 24), "text"),
    "picture last": ("text", (16, 16)),
    "two pictures": ((16, 16), "text", (24, 16), "text"),
    "two in a row": ("text", (16, 16), (32, 16), "text"),
    "text only": ("text", "text"),
}
MORE = random_ids(8, seed=9)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Engines by family, made when they are asked for."""

    @functools.cache
    def engine(name: str) -> Engine:
        return Engine(load_model(str(seeing_folder(tmp_path_factory.mktemp(name), name))))

    return engine


class Prompted:
    """The ids of a prompt of text and pictures, its sight, and what the stock forward takes."""

    def __init__(self, engine: Engine, name: str, parts):
        images = [scribble(*size, seed=at) for at, size in enumerate(parts) if size != "text"]
        pixels = engine.eyes.prepare(images) if images else None
        facts, ids = iter(pixels.facts if pixels else ()), []
        for at, part in enumerate(parts):
            ids += (
                random_ids(4, seed=at)[0].tolist() if part == "text" else [START, *[IMAGE] * next(facts)["tokens"], END]
            )
        self.ids, self.engine = torch.tensor([ids]), engine
        self.sight = engine.eyes.look(self.ids, pixels) if pixels else None
        self.tensors = dict(pixels.tensors) if pixels else {}
        self.kinds = "token_type_ids" if name.startswith("gemma") else "mm_token_type_ids"

    def stock(self, more=MORE) -> torch.Tensor:
        """Logits after the prompt and after each token of `more`, `[1 + T, vocab]`."""
        model, ids = self.engine.loaded.model, torch.cat((self.ids, more), dim=1)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None  # what the stock forward keeps of the prompt before
        kinds = {self.kinds: (ids == IMAGE).int()} if self.tensors else {}
        with torch.no_grad():
            return model(ids, **kinds, **self.tensors).logits[0, self.ids.shape[1] - 1 :]

    @torch.inference_mode()
    def ours(self, cut: PrefillCut | None, more=MORE) -> torch.Tensor:
        """The same by our loop, token by token."""
        logits, state = self.engine.read(self.ids, Plan(cut), ROOM, sight=self.sight)
        steps = [
            decode_step(state.decoder, state.cache, state.positions, token, state.ffn) for token in more.split(1, dim=1)
        ]
        return torch.cat([logits, *steps])


def prompted(engines, name: str, kind: str = "two pictures") -> Prompted:
    return Prompted(engines(name), name, PROMPTS[kind])


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_nothing_skipped_is_the_stock_forward(engines, name, kind):
    one = prompted(engines, name, kind)
    assert gap(one.ours(PrefillCut(6)), one.stock()) < TOLERANCE
    assert gap(one.ours(None), one.ours(PrefillCut(6))) == 0


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_skipping_the_last_layer_changes_nothing(engines, name, kind):
    one = prompted(engines, name, kind)
    assert gap(one.ours(PrefillCut(5)), one.ours(None)) < TOLERANCE
    assert gap(one.ours(PrefillCut(3)), one.ours(None)) > 1e-3


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_one_pass_is_two(engines, name):
    """Skip layers for all tokens but the last, then write that one as if it were decoded."""
    one = prompted(engines, name)
    single, engine = one.ours(PrefillCut(3)), one.engine
    with torch.inference_mode():
        _, state = engine.read(one.ids[:, :-1], Plan(PrefillCut(3, boundary=0)), ROOM, sight=cut_short(one.sight))
        tokens = torch.cat((one.ids[:, -1:], MORE), dim=1)
        steps = [decode_step(state.decoder, state.cache, state.positions, t) for t in tokens.split(1, dim=1)]
    assert gap(single, torch.cat(steps)) < TOLERANCE


def cut_short(sight):
    """The sight of a prompt without its last token, which is text."""
    return sight if sight.positions is None else replace(sight, positions=sight.positions[:, :-1])


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_interleaved_runs_are_what_they_are_alone(engines, name):
    prompts = [prompted(engines, name, kind) for kind in ("one picture", "two in a row", "text only")]
    alone = [one.ours(PrefillCut(3)) for one in prompts]
    with torch.inference_mode():
        reads = [one.engine.read(one.ids, Plan(PrefillCut(3)), ROOM, sight=one.sight) for one in prompts]
        found = [[logits] for logits, _ in reads]
        for token in MORE.split(1, dim=1):
            for logits, (_, state) in zip(found, reads, strict=True):
                logits.append(decode_step(state.decoder, state.cache, state.positions, token))
    for logits, expected in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(logits), expected)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_nothing_of_a_run_is_left_on_the_model(engines, name):
    one = prompted(engines, name)
    one.ours(PrefillCut(3))
    assert getattr(one.engine.loaded.model.model, "rope_deltas", None) is None


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_a_picture_matters(engines, name):
    """Controls: another picture, and the same one without DeepStack or without its two-dimensional positions."""
    one, expected = prompted(engines, name), prompted(engines, name).ours(None)
    whole = one.sight
    one.sight = replace(whole, features=whole.features.flip(0))
    assert gap(one.ours(None), expected) > 1e-3
    if whole.deepstack:
        one.sight = replace(whole, deepstack=tuple(level * 0 for level in whole.deepstack))
        assert gap(one.ours(None), expected) > 1e-3
    if whole.positions is not None:
        one.sight = replace(whole, positions=None)
        assert gap(one.ours(None), expected) > 1e-3


@pytest.mark.parametrize("name", [n for n in SEEING_MAKERS if n.startswith("qwen3")])
def test_a_cutoff_below_deepstack_is_refused(engines, name):
    one = prompted(engines, name)
    with pytest.raises(PopError, match=r"first 2 layers .* it must be 2 to 6"):
        one.ours(PrefillCut(1))
    one.ours(PrefillCut(2))
    text = prompted(engines, name, "text only")
    assert torch.isfinite(text.ours(PrefillCut(1))).all()


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_gates_of_zero_are_the_pruned_prefill(engines, name):
    one = prompted(engines, name)
    ids, boundary, cutoff = torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1, 3
    gate = gates.ones(one.engine.decoder, ids.shape[1])
    gate[cutoff:, :, :boundary] = 0
    with torch.no_grad():
        logits = gates.gated_logits(one.engine.decoder, ids, boundary, gate, sight=one.sight)[0]
    assert gap(logits, one.ours(PrefillCut(cutoff))) < TOLERANCE


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_leaving_out_a_layer_is_a_gate_of_zero(engines, name):
    one = prompted(engines, name)
    decoder, ids, boundary = one.engine.decoder, torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1
    found = ablate(decoder, ids, boundary, sight=one.sight)
    with torch.no_grad():
        dense = gates.gated_logits(decoder, ids, boundary, sight=one.sight)[0]
        for layer in range(6):
            for stage, where in (("prefill", slice(0, boundary)), ("decode", slice(boundary, None))):
                gate = gates.ones(decoder, ids.shape[1])
                gate[layer, :, where] = 0
                logits = gates.gated_logits(decoder, ids, boundary, gate, sight=one.sight)[0]
                expected = mean(divergence(dense, logits)[0])
                assert getattr(found, f"{stage}_kl")[layer] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_what_a_cutoff_costs_is_what_a_cut_run_costs(engines, name):
    one = prompted(engines, name)
    ids, boundary = torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1
    found = cut_divergence(one.engine.decoder, ids, boundary, 3, sight=one.sight)
    for cutoff, value in zip(range(3, 6), found, strict=True):
        expected = mean(divergence(one.ours(None), one.ours(PrefillCut(cutoff)))[0])
        assert value == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_channels_are_pruned_after_pictures(engines, name):
    """A ratio of 0 is the dense run; half of the channels are not, but for the first token, which the prompt gives."""
    one = prompted(engines, name)
    engine, dense = one.engine, one.ours(None)
    none, half = (
        engine.continuation_logits(one.ids, MORE, Plan(channels=ChannelPruning(ratio, 0.0)), one.sight)
        for ratio in (0, 0.5)
    )
    assert gap(none, dense[:-1]) < TOLERANCE
    assert gap(half[0], dense[0]) < TOLERANCE
    assert gap(half[1:], dense[1:-1]) > 1e-3


@pytest.mark.parametrize("name", [n for n in SEEING_MAKERS if n.startswith("qwen3")])
def test_a_layer_that_goes_takes_no_level_of_deepstack_with_it(engines, name):
    decoder = engines(name).decoder
    assert decoder.levels == [[], [0], [1], [], [], [], []]
    assert decoder.keeping([0, 2, 3]).levels == [[], [0, 1], [], []]
    assert decoder.keeping([1, 4]).levels == [[0], [1], []]
    one = prompted(engines, name)
    gate = gates.ones(decoder, one.ids.shape[1])
    gate[[0, 4]] = 0
    fewer = Engine.__new__(Engine)
    fewer.__dict__ |= engines(name).__dict__ | {"decoder": decoder.keeping([1, 2, 3, 5])}
    fewer.check = lambda plan, sees: None
    with torch.no_grad():
        expected = gates.gated_logits(decoder, one.ids, one.ids.shape[1] - 1, gate, sight=one.sight)[0]
        assert gap(fewer.read(one.ids, DENSE, 0, sight=one.sight)[0], expected) < TOLERANCE


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


@pytest.mark.parametrize(
    "cut", [PrefillCut(3, sinks=4), PrefillCut(3, boundary=9), PrefillCut(3, sinks=3, boundary=12)]
)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_tokens_of_a_picture_may_run_every_layer(engines, name, cut):
    """Against gates that freeze all other tokens from the cutoff up, which Gemma's both-ways pictures see too."""
    one = prompted(engines, name, "two in a row")
    ids, length = torch.cat((one.ids, MORE), 1), one.ids.shape[1]
    gate = gates.ones(one.engine.decoder, ids.shape[1])
    gate[cut.cutoff :, :, cut.sinks : length - cut.boundary] = 0
    with torch.no_grad():
        logits = gates.gated_logits(one.engine.decoder, ids, length - 1, gate, sight=one.sight)[0]
    assert gap(logits, one.ours(cut)) < TOLERANCE


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
