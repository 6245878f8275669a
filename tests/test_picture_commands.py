"""Pictures on the command line, in the bench and in the measure of exact answers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_files import tiny_folder
from tiny_vision import SEEING_MAKERS, scribble, seeing_folder

from pop_core import quality, scene_quality, scenes
from pop_core.__main__ import main
from pop_core.bench import bench_prefill
from pop_core.channel_study import plans_of, study
from pop_core.compare import compare
from pop_core.divergence import divergence, mean
from pop_core.engine import Engine
from pop_core.errors import PopError
from pop_core.loading import load_model
from pop_core.plan import DENSE, ChannelPruning, Plan, PrefillCut
from pop_core.samples import text_samples
from pop_core.sampling import Sampling
from pop_core.text import encode_text

KEYS = "image_tokens vision_ms pictures"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(seeing_folder(tmp_path_factory.mktemp("model"), "qwen3-vl"))


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine(load_model(folder))


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "noise.png"
    scribble(48, 32).save(path)
    return str(path)


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    """Run a command on the tiny model in this process; the parsed JSON of its last line, or what it said on stderr."""
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str, model: str = folder):
        code = main([*arguments, "--model", model, "--json"])
        said = capsys.readouterr()
        return json.loads(said.out.splitlines()[-1]) if code == 0 else said.err.splitlines()[-1]

    return call


def test_generate(command, picture):
    options = ("--prompt", "Hi", "--max-new-tokens", "3", "--cutoff", "4")
    one = command("generate", *options, "--image", picture)
    assert one["image_tokens"] == 24 and one["vision_ms"] > 0 and one["skipped_layers"] == 2
    assert one["pictures"] == [
        {"width": 48, "height": 32, "seen_width": 48, "seen_height": 32, "tokens": 24, "rows": 4, "columns": 6}
    ]
    two = command("generate", *options, "--image", picture, "--image", picture, "--image-tokens", "4")
    assert two["image_tokens"] == 4 and len(two["pictures"]) == 2
    assert "at most 4 are allowed" in two["notices"][0]
    none = command("generate", *options)
    assert (none["image_tokens"], none["vision_ms"], none["pictures"]) == (0, 0.0, [])


def test_compare(command, picture):
    result = command("compare", "--prompt", "Hi", "--image", picture, "--max-new-tokens", "3", "--cutoff", "4")
    assert result["dense"]["image_tokens"] == result["pruned"]["image_tokens"] == 24
    assert result["dense"]["vision_ms"] == result["pruned"]["vision_ms"] > 0  # they share what was seen
    assert "thumbnail" not in json.dumps(result)


def test_quality_of_a_text_behind_pictures(command, picture, tmp_path):
    (tmp_path / "text.txt").write_text("the old dog sleeps under the tree" * 5)
    counts = ("--prompt-tokens", "20", "--new-tokens", "5", "--segments", "2")
    options = ("--text", str(tmp_path / "text.txt"), *counts, "--cutoff", "3")
    behind, alone = command("quality", *options, "--image", picture), command("quality", *options)
    assert behind["prompt_tokens"] == alone["prompt_tokens"] + 24 + 2  # its tokens, its start and its end
    assert behind["tokens"] == alone["tokens"] == 10 and behind["loss_dense"] != alone["loss_dense"]


@pytest.mark.parametrize(
    ("arguments", "image_tokens"),
    [
        (("--prompt", "Hi", "--image", "PICTURE"), 24),
        (("--image", "PICTURE", "--prompt-tokens", "9", "--new-tokens", "4"), 24),
        (("--scenes",), 16),
    ],
)
def test_importance(command, picture, monkeypatch, arguments, image_tokens):
    monkeypatch.setattr("pop_core.scenes.SIDE", 32)
    monkeypatch.setattr("pop_core.scenes.picture.__defaults__", (32,))
    arguments = [picture if part == "PICTURE" else part for part in arguments]
    result = command("importance", "--samples", "2", *arguments)
    assert result["image_tokens"] == image_tokens and {"image_se", "text_se"} <= set(result["layers"][0])
    assert set(result["cutoffs_by_kind"]) == {"image", "text"} and result["lowest_cutoff"] == 2
    assert "thumbnail" not in json.dumps(result)


def test_quality_on_scenes(command):
    result = command("quality", "--scenes", "2", "--cutoff", "5")
    assert {"accuracy_dense", "accuracy", "kl", "agreement"} <= set(result)
    assert result["kl"] == pytest.approx(0, abs=1e-6) and result["agreement"] == 1 and result["scenes"] == 2


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_bench_of_reading_pictures(name, tmp_path, picture):
    engine = Engine(load_model(str(seeing_folder(tmp_path, name))))
    result = bench_prefill(engine, None, Plan(PrefillCut(4)), 2, images=[picture])
    assert result["tokens"] > result["image_tokens"] + 32 and result["vision_ms"] > 0
    assert result["ms_stock"] > 0 and result["speedup_vs_stock"] > 0
    assert getattr(engine.loaded.model.model, "rope_deltas", None) is None


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_the_bench_holds_the_stock_forward_against_the_same_prompt(name, tmp_path, picture):
    engine = Engine(load_model(str(seeing_folder(tmp_path, name))))
    prompt = engine.encode("Hi", Sampling(1), None, [picture])
    ids = engine.token_ids(prompt.ids)
    with torch.inference_mode():
        arguments = engine.eyes.stock_arguments(ids, prompt.pixels)
        stock = engine.loaded.model(ids, use_cache=True, logits_to_keep=1, **arguments).logits[:, -1]
        assert (stock - engine.read(ids, DENSE, 0, sight=engine.look(prompt))[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "--prompt", "Hi", "--image", "/no/such.png"), "no file"),
        (("generate", "--prompt", "Hi", "--image-tokens", "9"), "--image-tokens is about pictures: give --image too."),
        (("generate", "--prompt", "Hi", "--image", "PICTURE", "--cutoff", "1"), "it must be 2 to 6."),
        (("bench", "prefill", "--image", "PICTURE", "--cutoff", "1"), "it must be 2 to 6."),
        (("quality", "--scenes", "0"), "it must be 1 to 10,000."),
        (("quality", "--scenes", "3", "--cutoff", "1"), "it must be 2 to 6."),
        (("quality", "--scenes", "3", "--image", "PICTURE"), "leave out --image."),
        (("quality", "--scenes", "3", "--segments", "4", "--new-tokens", "9"), "takes --new-tokens and --segments:"),
        (("importance", "--scenes", "--image", "PICTURE"), "leave out --image."),
        (("importance", "--scenes", "--prompt-tokens", "9"), "Only a text that is cut into samples takes --prompt-tok"),
        (("importance", "--prompt", "Hi", "--prompt-tokens", "9"), "takes --prompt-tokens: leave out what"),
    ],
)
def test_one_sentence(command, picture, arguments, sentence):
    said = command(*(picture if part == "PICTURE" else part for part in arguments))
    assert said.startswith("error: ") and sentence in said


def test_a_model_without_eyes_says_so(command, picture, tmp_path):
    blind = str(tiny_folder(tmp_path / "blind", "qwen3"))
    for arguments in (("generate", "--prompt", "Hi", "--image", picture), ("quality", "--scenes", "1")):
        said = command(*arguments, model=blind)
        assert said == (
            f"error: {blind} reads text only and cannot see a picture; use shapes-vl, or a Qwen2.5-VL, Qwen3-VL, "
            "Qwen3-VL-MoE or Gemma 3 model."
        )


def test_an_answer_is_exact_when_greedy_decoding_writes_it(engine, monkeypatch):
    """Answers made from what the model writes are exact, and one token changed makes them wrong."""
    scene, *_ = scenes.held_out_scenes(1)
    image = scenes.picture(scene)
    run = engine.generate("Hi", DENSE, Sampling(64), images=[image])
    written = engine.loaded.tokenizer.decode(run.tokens[:3])
    ids = encode_text(engine.loaded.tokenizer, written)
    prompt = engine.encode("Hi", Sampling(), images=[image])
    logits = engine.continuation_logits(
        engine.token_ids(prompt.ids), engine.token_ids([*run.tokens[:3], 5]), DENSE, engine.look(prompt)
    )
    ends = frozenset([logits[-1].argmax().item()])
    assert ids and scene_quality._exact(logits, [*run.tokens[:3], 0], ends)
    assert not scene_quality._exact(logits, [run.tokens[0], run.tokens[1] + 1, run.tokens[2], 0], ends)
    assert not scene_quality._exact(logits, [*run.tokens[:3], 0], frozenset([96]))


def test_templates_kept_apart_are_read(folder, tmp_path):
    """Checkpoints made before tokenizers kept their template have it in a file of its own."""
    copy = tmp_path / "old"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    assert not load_model(str(copy)).tokenizer.chat_template
    template = "{{ messages[0]['content'][1]['text'] }}"
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    loaded = load_model(str(copy))
    assert loaded.tokenizer.chat_template == template
    with pytest.raises(PopError, match="no place for pictures"):
        Engine(loaded).encode("Hi", Sampling(), True, [scribble(16, 16)])


def test_what_is_measured_is_measured_on_the_picture(engine, picture):
    """KL of a comparison and of a text, each against logits of the same prompt with its picture."""
    plan, sampling = Plan(PrefillCut(3)), Sampling(6)
    found = compare(engine, "Hi", plan, sampling=sampling, repeats=1, images=[picture])
    prompt = engine.encode("Hi", sampling, images=[picture])
    ids, answer, sight = engine.token_ids(prompt.ids), engine.token_ids(found.dense["tokens"]), engine.look(prompt)
    logits = [engine.continuation_logits(ids, answer, p, sight) for p in (DENSE, plan)]
    assert found.kl == pytest.approx(mean(divergence(*logits)[0]), rel=1e-4) and found.kl > 1e-3
    (sample,) = text_samples(engine, "the old dog sleeps under the tree", 12, 4, 1, [picture], spread=False)
    prompt = engine.token_ids(sample.ids[: sample.prompt_tokens])
    text, sight = engine.token_ids(sample.ids[sample.prompt_tokens :]), engine.look(sample.prompt)
    logits = [engine.continuation_logits(prompt, text, p, sight) for p in (DENSE, plan)]
    measured = quality.measure(engine, [sample], [plan])[0]
    assert measured.kl == pytest.approx(mean(divergence(*logits)[0]), rel=1e-4)


def test_a_study_of_channels_is_made_on_the_picture(engine, picture):
    """KL of every method, of which the peers read no prompt, and how far layers agree, with the picture and without."""
    plan, sampling = Plan(channels=ChannelPruning(0.4)), Sampling(6)
    found = study(engine, "Hi", plan, sampling=sampling, peers=False, rounds=1, images=[picture])
    prompt, answer = engine.encode("Hi", sampling, images=[picture]), engine.token_ids(found.dense["tokens"])
    ids, sight = engine.token_ids(prompt.ids), engine.look(prompt)
    dense = engine.continuation_logits(ids, answer, DENSE, sight)
    assert len(found.methods) > 3
    for row in found.methods[1:]:
        logits = engine.continuation_logits(ids, answer, plans_of(plan, False)[row["name"]], sight)
        assert row["kl"] == pytest.approx(mean(divergence(dense, logits)[0]), rel=1e-4)
        assert row["kl"] > 1e-5
    other = study(engine, "Hi", plan, sampling=sampling, peers=False, rounds=1, images=[scribble(48, 32, seed=3)])
    assert other.top_half != found.top_half


@pytest.mark.parametrize("kind", [Image.Image, np.ndarray, str, bytes])
def test_one_picture_need_not_be_in_a_list(engine, picture, kind):
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    one = {Image.Image: image, np.ndarray: np.asarray(image), str: picture, bytes: Path(picture).read_bytes()}[kind]
    plan, sampling = Plan(PrefillCut(3), ChannelPruning(0.4)), Sampling(4)
    alone, listed = (engine.generate("Hi", plan, sampling, images=images) for images in (one, [one]))
    assert alone.tokens == listed.tokens and alone.image_tokens == 24
    assert compare(engine, "Hi", plan, sampling=sampling, repeats=1, images=one).pruned["tokens"] == alone.tokens
    assert study(engine, "Hi", plan, sampling=sampling, peers=False, rounds=1, images=one).pruned["image_tokens"] == 24
    assert bench_prefill(engine, None, plan, 1, images=one)["image_tokens"] == 24


def test_every_token_of_an_answer_counts():
    target = [5, 6, 7, 8, 9, 0]
    for wrong in range(6):
        logits = torch.zeros(6, 20)
        logits[range(6), [*target[:-1], 3]] = 1
        assert scene_quality._exact(logits, target, frozenset([3]))
        logits[wrong, 11] = 2
        assert not scene_quality._exact(logits, target, frozenset([3]))


def test_shapes_vl_answers_and_a_deep_cut_costs_answers():
    """The bundled model: most answers about held-out scenes are exact, and counts by kind add up to the shares."""
    engine = Engine(load_model("shapes-vl"))
    found, same = scene_quality.measure_scenes(engine, 24, [Plan(PrefillCut(3)), Plan(PrefillCut(11))])
    counts = found.by_kind.values()
    assert found.accuracy_dense >= 0.9
    assert found.accuracy < found.accuracy_dense - 0.05 and found.kl > 0.1
    assert same.accuracy == same.accuracy_dense and same.agreement == 1
    assert found.questions == sum(count["questions"] for count in counts)
    assert found.accuracy == sum(count["plan"] for count in counts) / found.questions
    assert found.accuracy_dense == sum(count["dense"] for count in counts) / found.questions
    entries = [measured.to_dict() for measured in (found, same)]
    assert scene_quality.best_kept(entries, 11) == entries[1]
