"""The analysis on prompts with pictures: two kinds of tokens that add up to what is read, and a map of every patch."""

import json
from unittest.mock import Mock

import pytest
import torch
from test_gates import kept_bytes, traces
from tiny_vision import SEEING_MAKERS, scribble, tiny_seeing_model
from torch.nn.functional import cross_entropy

from pop_core import baselines, gates, importance, kv_fit, quality, scene_quality
from pop_core.ablation import ablate, cut_divergence
from pop_core.analysis import analyse, sample_generator
from pop_core.costs import analysis_bytes
from pop_core.decoder import Decoder
from pop_core.divergence import mean
from pop_core.errors import Cancelled, PopError
from pop_core.picture_view import grids, layer_sums
from pop_core.plan import Plan, PrefillCut
from pop_core.samples import Sample, image_samples, text_samples

EPSILON = 1e-5
QUESTIONS = (("what", "the cat"), ("where is it", "a wood"), ("who", "the dog"), ("what now", "this"))
KINDS = {f"{kind}_{part}" for kind in importance.KINDS for part in ("attention", "ffn", "se")}
WITHOUT_CLOCK = ("seconds", "forward_equivalents", "date")


def samples_of(engine, count: int = 4) -> list[Sample]:
    """Of different lengths; the second one has two pictures."""
    pictures = [[scribble(16, 16, seed)] + [scribble(24, 16)] * (seed == 1) for seed in range(count)]
    prompts = [(images, *QUESTIONS[at % 4]) for at, images in enumerate(pictures)]
    return image_samples(engine, prompts, 8)


def gradients(engine, sample: Sample, seed: int = 0, **options) -> gates.GateGradients:
    ids = torch.tensor([sample.ids[:-1]])
    drawn = sample_generator(seed, sample)
    return gates.gate_gradients(
        engine.decoder, ids, sample.boundary, drawn, sight=engine.look(sample.prompt), **options
    )


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_image_tokens_and_text_tokens_add_up_to_what_is_read(engines, name):
    engine = engines(name)
    for sample in samples_of(engine):
        found = gradients(engine, sample)
        assert torch.allclose(found.image + found.text, found.prefill, rtol=1e-9, atol=1e-15)
        assert len(found.seen) == sample.image_tokens
        assert (found.image[:-1] != 0).all() and (found.text[:-1] != 0).all() and (found.image[-1] == 0).all()
        again = gradients(engine, sample, recompute=True)
        assert torch.equal(found.by_token, again.by_token) and found.seen == again.seen


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl", "gemma3-vl"])
def test_the_gate_of_all_image_tokens_has_the_slope_of_the_loss(engines, name):
    """In float64, moving the gates of all image tokens of a layer, and of all text tokens, together."""
    engine = engines(name)
    sample = samples_of(engine, 2)[1]
    decoder = Decoder(tiny_seeing_model(name).double(), engine.spec)
    ids, sight = torch.tensor([sample.ids[:-1]]), engine.look(sample.prompt)
    found = gates.gate_gradients(decoder, ids, sample.boundary, sample_generator(0, sample), sight=sight)
    logits = gates.gated_logits(decoder, ids, sample.boundary, sight=sight)[0]
    labels, slots = gates.draw(logits, sample_generator(0, sample)), sight.slots.tolist()
    others = [slot for slot in range(sample.boundary) if slot not in slots]
    for kind, where in (("image", slots), ("text", others)):
        stage = getattr(found, kind)
        for layer in range(engine.spec.layers):
            for branch in (gates.ATTENTION, gates.FFN):
                losses = []
                for move in (EPSILON, -EPSILON):
                    moved = gates.ones(decoder, ids.shape[1])
                    moved[layer, branch, where] += move
                    moved_logits = gates.gated_logits(decoder, ids, sample.boundary, moved, sight=sight)[0]
                    losses.append(cross_entropy(moved_logits, labels, reduction="sum").item())
                slope = (losses[0] - losses[1]) / (2 * EPSILON)
                assert abs(stage[layer, branch] - slope) <= 1e-6 * max(abs(slope), 1e-3 * stage.abs().max())


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_a_result_tells_the_kinds_apart(engines, name):
    engine = engines(name)
    samples = samples_of(engine)
    result = json.loads(json.dumps(analyse(engine, samples, ablation=2, tolerance=0.1).to_dict(), allow_nan=False))
    squares = {"image": 0, "text": 0}
    for sample in samples:
        found = gradients(engine, sample)
        squares = {kind: squares[kind] + getattr(found, kind).square() / 2 for kind in squares}
    for kind, expected in squares.items():
        for entry, values in zip(result["layers"], (expected / len(samples)).tolist(), strict=True):
            assert [entry[f"{kind}_{branch}"] for branch in importance.BRANCHES] == pytest.approx(values, rel=1e-9)
            assert set(entry) >= KINDS
    assert result["cutoffs_by_kind"] == {
        kind: importance.recommend(result["layers"], 0.1, kind) for kind in importance.KINDS
    }
    assert result["image_tokens"] == mean([sample.image_tokens for sample in samples])
    assert len(result["pictures"]) == 1 and result["pictures"][0]["thumbnail"].startswith("data:image")
    assert result["prompt_tokens"] == round(mean([sample.prompt_tokens for sample in samples]))
    assert result["ablation"]["samples"] == 2 and result["complete"]


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_cuts_and_ablation_are_those_of_the_samples_with_their_pictures(engines, name):
    engine = engines(name)
    samples = samples_of(engine)
    result = analyse(engine, samples, ablation=1)
    first = samples[0]
    options = engine.decoder, torch.tensor([first.ids[:-1]]), first.boundary
    sight, lowest = engine.look(first.prompt), max(1, engine.spec.deepstack, engine.spec.layers // 2)
    cuts = cut_divergence(*options, lowest, sight=sight)
    assert result.cut_kl == [
        {"cutoff": cutoff, "kl": kl} for cutoff, kl in zip(range(lowest, engine.spec.layers), cuts, strict=True)
    ]
    assert result.ablation["prefill_kl"] == ablate(*options, sight=sight).prefill_kl


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3-vl"])
def test_no_order_of_the_samples_changes_anything(engines, name):
    """Also where two have the same ids and another picture, and where one is there twice."""
    engine = engines(name)
    same_words = image_samples(engine, [([scribble(16, 16, seed)], "what", "a dog") for seed in (7, 8)], 8)
    assert same_words[0].ids == same_words[1].ids
    samples = [*samples_of(engine), *same_words, same_words[0]]
    first, other = (analyse(engine, order) for order in (samples, samples[::-1]))
    assert first.layers == other.layers and first.cutoffs_by_kind == other.cutoffs_by_kind


def test_the_same_sample_again_draws_other_labels(engines):
    engine = engines("qwen3-vl")
    one = samples_of(engine, 1)
    once, often = analyse(engine, one), analyse(engine, one * 6)
    assert once.layers[0]["image_se"] is None and often.layers[0]["image_se"] > 0
    assert often.layers != once.layers and often.to_dict()["token_map"] == once.to_dict()["token_map"]


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_the_token_map_has_every_patch_where_it_is(engines, name):
    engine = engines(name)
    samples = samples_of(engine, 2)[::-1]  # two pictures in the first one
    result, sight = analyse(engine, samples).to_dict(), engine.look(samples[0].prompt)
    shown = result["token_map"]
    assert shown["first"] == 0 and shown["pictures"] == [
        {"start": place.start, "rows": place.rows, "columns": place.columns} for place in sight.places
    ]
    found = gradients(engine, samples[0]).by_token.square().sum(1) / 2
    place = sight.places[1]
    grid = found[2, place.start : place.stop].reshape(place.rows, place.columns)
    assert torch.allclose(torch.tensor(grids(result)[2][1]).double(), grid, rtol=1e-2)
    assert layer_sums(result)[-1] == 0


def test_text_with_a_picture_in_front_is_analysed_too(engines):
    engine = engines("qwen3-vl")
    text = "the cat and the dog walk in a wood " * 20
    result = analyse(engine, text_samples(engine, text, 12, 4, 3, [scribble(16, 16)]))
    assert result.image_tokens == 4 and result.lowest_cutoff == 2 and result.pictures
    plain = analyse(engine, text_samples(engine, text, 12, 4, 3))
    assert (plain.image_tokens, plain.pictures, plain.cutoffs_by_kind, plain.lowest_cutoff) == (0, [], None, 1)
    assert not KINDS & set(plain.layers[0]) and "pictures" not in plain.token_map


def test_a_cutoff_that_pictures_cannot_have_is_never_recommended(engines):
    engine = engines("qwen3-vl")
    result = analyse(engine, samples_of(engine), tolerance=1.0)
    assert result.recommended_cutoff == result.lowest_cutoff == 2
    assert importance.recommended(result.to_dict(), 1.0) == 2
    assert analyse(engines("gemma3-vl"), samples_of(engines("gemma3-vl")), tolerance=1.0).recommended_cutoff == 1


def test_memory_is_judged_by_the_longest_sample(engines, monkeypatch):
    engine = engines("qwen3-vl")
    samples = samples_of(engine)
    longest, labels = max(len(sample.ids) for sample in samples), max(sample.new_tokens for sample in samples)
    asked = []
    monkeypatch.setattr("pop_core.memory.require", lambda need, device, what: asked.append(need))
    analyse(engine, samples)
    assert analysis_bytes(engine.spec, longest - 1, labels, 4, recompute=False) in asked


def test_a_sample_that_is_too_long_names_its_pictures(engines, monkeypatch):
    engine = engines("qwen3-vl")
    monkeypatch.setattr(importance, "MOST_TOKENS", 20)
    with pytest.raises(PopError, match="of them for pictures; the analysis takes at most 20"):
        analyse(engine, samples_of(engine))


@pytest.mark.parametrize("end", ["done", "cancelled"])
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_nothing_is_left_on_the_model(engines, name, end):
    engine = engines(name)
    model, samples = engine.loaded.model, samples_of(engine)
    before, left = traces(model), [None] * (10_000 if end == "done" else 20)

    def checkpoint():
        if not left:
            raise Cancelled
        left.pop()

    result = analyse(engine, samples, ablation=1, checkpoint=checkpoint)
    assert result.complete == (end == "done")
    assert traces(model) == before and getattr(model.model, "rope_deltas", None) is None
    assert all(p.grad is None for p in model.parameters())


def test_stop_reaches_into_the_vision_tower(engines, monkeypatch):
    engine, given = engines("qwen3-vl"), []
    look = engine.eyes.look
    monkeypatch.setattr(engine.eyes, "look", lambda *arguments: given.append(arguments[2]) or look(*arguments))

    sample, plan, checkpoint = samples_of(engine)[0], Plan(PrefillCut(3)), Mock(return_value=None)
    analyse(engine, [sample], checkpoint=checkpoint)
    quality.measure(engine, [sample], [plan], checkpoint)
    scene_quality.measure_scenes(engine, 1, [plan], checkpoint)
    list(baselines.calibrate(engine, [sample], checkpoint))
    monkeypatch.setattr(kv_fit, "_save", lambda *_: None)
    kv_fit.fit(engine, [sample], [3], checkpoint=checkpoint)
    assert len(given) >= 5 and set(given) == {checkpoint}


def test_one_prompt_again_and_again_is_called_that(engines):
    engine = engines("qwen3-vl")
    one, other = samples_of(engine)[:2]
    assert [analyse(engine, some).distinct for some in ([one] * 3, [one, other, one])] == [1, 2]


@pytest.mark.parametrize("size", [(64, 64), (256, 256)])
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_the_memory_asked_for_is_what_a_backward_pass_keeps(engines, name, size):
    engine, labels = engines(name), 6
    many = [scribble(*size)] * (40 if name.startswith("gemma") else 1)  # there every picture takes four tokens
    sample = image_samples(engine, [(many, "what", "a cat")], labels)[0]
    ids, sight, spec = torch.tensor([sample.ids[:-1]]), engine.look(sample.prompt), engine.spec
    full, short = (kept_bytes(engine.decoder, ids, sample.boundary, recompute, sight) for recompute in (False, True))
    for recompute, kept in ((False, full), (True, short + full // spec.layers)):
        assert kept <= analysis_bytes(spec, ids.shape[1], labels, 4, recompute) <= 3.5 * kept
