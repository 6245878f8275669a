"""Loading: what comes out is the model that is in the files, by every name that it may have."""

import math

import pytest
import torch
from tiny import random_ids, tiny_model
from tiny_files import tiny_folder
from tiny_gguf import write_gguf

from pop_core import cgroup, embedded, loading, placement
from pop_core.errors import (
    BrokenModel,
    ModelNotFound,
    PopError,
)
from pop_core.families import read_spec
from pop_core.loading import load_model, resolve

FAMILIES = ("llama", "llama-tied", "mistral-window", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_model_that_was_saved(family, tmp_path):
    loaded = load_model(str(tiny_folder(tmp_path, family)))
    model = tiny_model(family)
    ids = random_ids(12)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.spec == read_spec(model.config) and loaded.source == "folder" and loaded.notices == ()
    assert loaded.parameters == sum(p.numel() for p in model.parameters())  # A18: tied ones once
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert not any(hasattr(module, "_hf_hook") for module in loaded.model.modules())
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert not loaded.packed and not loaded.offloaded
    if loaded.model.config.tie_word_embeddings:
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_a_gguf_file_loads_with_a_notice_and_can_be_saved(tmp_path):
    """C03, C04: unpacked weights are plain tensors, said to be so, and save like any other."""
    model = tiny_model("qwen3")
    path = write_gguf(tmp_path / "m.gguf", model, "qwen3")
    loaded = load_model(str(path), dtype="bfloat16")
    assert loaded.source == "gguf" and loaded.dtype == loaded.model.dtype == torch.bfloat16 and not loaded.packed
    assert "F32" in loaded.notices[0] and "dequantised to bfloat16" in loaded.notices[0]
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    assert load_model(str(tmp_path / "saved"), dtype="bfloat16").identity() == loaded.identity()


def test_identity_is_that_of_names_shapes_dtypes_and_bytes(llama, damaged):
    first = load_model(str(llama))
    assert first.identity() == load_model(str(llama)).identity() and len(first.identity()) == 64
    others = [load_model(str(llama), dtype="bfloat16").identity()]
    damaged.tensors["model.norm.weight"][0] += 1
    damaged.save(damaged.tensors)
    others.append(load_model(str(damaged.folder)).identity())
    assert len({first.identity(), *others}) == 3


def test_deep_layers_on_the_disk(llama):
    """C08."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 3 else "disk" for i in range(6)}
    loaded = load_model(str(llama), device_map=places)
    assert loaded.offloaded and not loaded.packed and "offloaded" in loaded.notices[0]
    ids = random_ids(9)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    with pytest.raises(PopError, match="offloaded"):
        loaded.identity()
    places |= {"model.embed_tokens": "disk"}
    assert load_model(str(llama), device_map=places).device == torch.device("cpu")


def test_packed_weights_are_noticed(llama):
    """C05, C07."""
    loaded = load_model(str(llama))
    linear = loaded.model.model.layers[2].mlp.up_proj
    linear.weight = torch.nn.Parameter(torch.zeros(48, 18, dtype=torch.uint8), requires_grad=False)
    assert loaded.packed
    del linear.weight  # as GPTQ layers, which have `qweight`
    assert loaded.packed


def test_a_base_model_gets_one_bos_and_a_notice(tmp_path):
    """C12."""
    loaded = load_model(str(tiny_folder(tmp_path, "llama", chat=False)))
    assert "no chat template" in loaded.notices[0]
    assert loaded.tokenizer("abc").input_ids.count(loaded.tokenizer.bos_token_id) == 1


def test_nothing_is_printed(llama, damaged, capfd):
    load_model(str(llama))
    del damaged.tensors["model.norm.weight"]
    damaged.save(damaged.tensors)
    with pytest.raises(BrokenModel):
        load_model(str(damaged.folder))
    assert capfd.readouterr() == ("", "")


def test_progress_grows_to_one_and_can_stop_the_loading(llama, tmp_path):
    for name in (llama, write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama")):
        seen = []
        load_model(str(name), progress=lambda fraction, text, seen=seen: seen.append(fraction))
        assert seen == sorted(seen) and seen[-1] == 1.0

    def stop(fraction, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(str(llama), progress=stop)


@pytest.mark.parametrize(
    "typed, expected",
    [
        (" smollm2 ", ("smollm2", "embedded")),
        ("gemma3-270m", ("gemma3-270m", "embedded")),
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "hub")),
        ('"Qwen/Qwen3-0.6B"', ("Qwen/Qwen3-0.6B", "hub")),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "hub")),
        ("http://www.huggingface.co/Qwen/Qwen3-0.6B/tree/main?x=1", ("Qwen/Qwen3-0.6B", "hub")),
        ("hf.co/Qwen/Qwen3-0.6B/", ("Qwen/Qwen3-0.6B", "hub")),
    ],
)
def test_names_that_are_understood(typed, expected):
    assert resolve(typed) == expected


@pytest.mark.parametrize(
    "typed",
    [
        *("", "  ", None, "gpt2", "a b/c", "a/b/c", "a--b/c", "a/b\0", "a\ud800/b", "x" * 5000),
        *("./nowhere", "../a/b", "/no/where", "~/nowhere", "C:\\models\\x", "x.gguf", "a/x.gguf"),
        *("https://example.com/a/b", "https://huggingface.co/gpt2", "https://huggingface.co/datasets/a/b"),
        *("s3://a/b", "file:///etc/passwd"),
    ],
)
def test_names_that_cannot_be_a_model_say_what_is_allowed(typed):
    with pytest.raises(ModelNotFound, match=r"use smollm2, .*, a local folder, a .gguf file, or a hub model"):
        resolve(typed)


def test_local_names(tmp_path, llama):
    assert resolve(f" {llama} ") == (str(llama), "folder")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ModelNotFound, match=r"not a .gguf file"):
        resolve(str(tmp_path / "a.txt"))
    with pytest.raises(ModelNotFound, match=r"no config.json"):
        load_model(str(tmp_path))


def test_devices_and_number_formats_are_checked_before_anything_is_read():
    for device in ("gpu", "cuda:99", "meta", "", None, "cpu:x"):
        with pytest.raises(PopError, match="device"):
            load_model("smollm2", device=device)
    for dtype in ("int8", "float64", "", None):
        with pytest.raises(PopError, match="dtype"):
            load_model("smollm2", dtype=dtype)
    assert placement.choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert placement.choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("quota", (0.5, 1.5, 1000, None))
def test_threads_are_what_the_container_pays_for(quota, monkeypatch):
    """F05."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    placement.fit_threads.__wrapped__()
    assert set_to == ([] if quota is None or quota >= threads else [math.ceil(quota)])


def test_the_embedded_names_are_the_ones_messages_offer():
    assert all(name in loading.ALLOWED for name in embedded.MODELS)
