"""The model that this repository brings along: it loads without a network, answers, and uses all of its experts."""

import json
import shutil

import pytest
import torch

from pop_core import embedded
from pop_core.embedded import BundledModel
from pop_core.errors import BrokenModel
from pop_core.loading import load_model

NAME = "stories-moe"
ANSWERS = {  # to the prompts of examples.json, all drawn from the held-out text
    "A story of many things": " The yellow plate is in the barrel.",
    "A talk about Monday": " Lily went to the beach.",
    "The clerk and the frog": " He lived in Tenby.",
    "The day before": " Wednesday, 20 March.",
}
ODD_TEXTS = (
    "",
    " two  spaces\tand\ttabs \r\n\r\n  ",
    "naïve café — “quoted”, don't I'd",
    "Здравствуй, 世界! שלום नमस्ते",
    "👩‍🚀🧪🏳️‍🌈 e\u0301 \u200b\u00a0\ufeff",
    "def f(x):\n    return {'a': [1, 23, 456]}\n",
    "\x00\x07 control",
)


@pytest.fixture(scope="module")
def loaded():
    return load_model(NAME, device="cpu")


def examples() -> list[dict]:
    return json.loads((embedded.MODELS[NAME].folder / "examples.json").read_text("utf-8"))


def continuation(loaded, prompt: str, tokens: int = 24) -> str:
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    written = loaded.model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return loaded.tokenizer.decode(written[0, ids.shape[1] :])


def test_it_loads_without_pip_and_without_a_cache(loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pop_core.wheels.PIP", ["/no/such/program"])
    folder = embedded.folder(NAME)
    assert folder == embedded.MODELS[NAME].folder and not (tmp_path / "cache").exists()
    assert loaded.source == "embedded" and loaded.dtype == torch.float32
    assert embedded.MODELS[NAME].notice in loaded.notices


def test_every_tensor_is_finite_and_every_expert_differs(loaded):
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.isfinite().all(), name
        if ".experts." in name:
            assert len({tuple(expert.flatten()[:16].tolist()) for expert in tensor}) == len(tensor), name


def test_the_repository_stays_small():
    assert sum(file.stat().st_size for file in embedded.MODELS[NAME].folder.rglob("*")) < 25e6


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back_from_its_tokens(text, loaded):
    ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.decode(ids) == text
    assert all(0 <= token < loaded.spec.vocab for token in ids)


def test_a_prompt_gets_no_special_token(loaded):
    tokenizer = loaded.tokenizer
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_id == loaded.model.generation_config.eos_token_id
    assert tokenizer.eos_token_id not in tokenizer("Where is the red key?").input_ids


@pytest.mark.parametrize("title", ANSWERS)
def test_it_answers_what_it_has_not_seen(title, loaded):
    (example,) = [example for example in examples() if example["title"] == title]
    first_line = continuation(loaded, example["prompt"]).removesuffix("<|end|>").partition("\n")[0]
    assert first_line == ANSWERS[title]


def test_every_example_has_its_answer_here():
    assert [example["title"] for example in examples()] == list(ANSWERS)


def test_every_expert_of_every_layer_is_used(loaded):
    used = [set() for _ in range(loaded.spec.layers)]
    for example in examples():
        ids = loaded.tokenizer(example["prompt"], return_tensors="pt").input_ids
        logits = loaded.model(ids, output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            used[layer] |= set(scores.topk(loaded.model.config.num_experts_per_tok).indices.flatten().tolist())
    assert used == [set(range(loaded.model.config.num_experts))] * loaded.spec.layers


@pytest.mark.parametrize("damage", ("cut", "no tokenizer"))
def test_a_damaged_copy_is_said_to_be_one(damage, tmp_path, monkeypatch):
    copy = tmp_path / NAME
    shutil.copytree(embedded.MODELS[NAME].folder, copy)
    monkeypatch.setitem(embedded.MODELS, "copy", BundledModel("Copy", copy, "none"))
    assert embedded.folder("copy") == copy
    if damage == "cut":
        with open(copy / "model.safetensors", "r+b") as weights:
            weights.truncate(5000)
    else:
        (copy / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match="restore it from the repository"):
        load_model("copy")
