"""Models that cannot be used: damaged or refused, each in one clear sentence (section C)."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_files import config_folder, tiny_folder
from tiny_vision import seeing_folder
from transformers import GPT2Config, MambaConfig, T5Config

from pop_core import memory
from pop_core.errors import (
    BrokenModel,
    NotEnoughMemory,
    PopError,
    UnsupportedModel,
)
from pop_core.families import supported_families
from pop_core.loading import load_model

EYES = {  # what is changed in which file of a model that sees, and what is said
    "merge": ("preprocessor_config.json", {"merge_size": 4}, "merge size 4, not 2"),
    "patch": ("preprocessor_config.json", {"patch_size": 8}, "patch size 8, not 4"),
    "no patch": ("preprocessor_config.json", {"patch_size": 0}, "do not fit its eyes"),
    "frames": ("preprocessor_config.json", {"temporal_patch_size": 1}, "temporal patch size 1, not 2"),
    "mean": ("preprocessor_config.json", {"image_mean": [0.5, 0.5]}, "do not fit its eyes"),
    "deviation": ("preprocessor_config.json", {"image_std": [0, 0, 0]}, "a white picture is not finite"),
    "bounds": ("preprocessor_config.json", {"size": {"height": 4, "width": 4}}, "do not fit its eyes"),
    "placeholder": ("config.json", {"image_token_id": 99_999}, "do not fit its eyes"),
    "start": ("config.json", {"vision_start_token_id": 99_999}, "do not fit its eyes"),
    "layers": ("config.json", {"text_config": {"num_hidden_layers": 30_000_000}}, "layers in the config is 30000000"),
    "tower": ("config.json", {"vision_config": {"depth": 30_000_000}}, "layers in the config is 30000000"),
    "width": ("config.json", {"vision_config": {"hidden_size": -4}}, "No model can be made of this config"),
}


@pytest.mark.parametrize(("name", "changes", "said"), EYES.values(), ids=EYES)
def test_eyes_that_do_not_fit_are_refused_when_the_model_is_loaded(tmp_path, name, changes, said):
    file = seeing_folder(tmp_path, "qwen3-vl") / name
    entries = json.loads(file.read_text())
    for key, value in changes.items():
        entries[key] = entries[key] | value if key.endswith("_config") else value
    file.write_text(json.dumps(entries))
    with pytest.raises(PopError, match=said) as error:
        load_model(str(tmp_path))
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_eyes_of_gemma_have_the_size_of_the_model(tmp_path):
    file = seeing_folder(tmp_path, "gemma3-vl") / "preprocessor_config.json"
    load_model(str(tmp_path))
    file.write_text(file.read_text().replace('"height": 16', '"height": 32'))
    with pytest.raises(BrokenModel, match="height 32, not 16"):
        load_model(str(tmp_path))


def test_a_missing_image_processor_is_said(tmp_path):
    (seeing_folder(tmp_path, "qwen3-vl") / "preprocessor_config.json").unlink()
    with pytest.raises(BrokenModel, match="image processor"):
        load_model(str(tmp_path))


def test_missing_unexpected_and_mismatched_tensors_are_named(damaged):
    name = "model.layers.3.mlp.up_proj.weight"
    for change, said in (
        ({name: None}, f"lacks tensors: {name}"),
        ({"model.layers.3.novelty": torch.zeros(1)}, "does not know: model.layers.3.novelty"),
        ({name: torch.zeros(3, 3)}, f"wrong shape: {name}"),
    ):
        damaged.save({key: value for key, value in (damaged.tensors | change).items() if value is not None})
        with pytest.raises(BrokenModel, match=said):
            load_model(str(damaged.folder))


def test_a_tied_head_may_be_absent_and_an_untied_may_not(damaged, tmp_path_factory):
    tied = tiny_folder(tmp_path_factory.mktemp("tied"), "llama-tied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_model(str(tied))
    del damaged.tensors["lm_head.weight"]
    damaged.save(damaged.tensors)
    with pytest.raises(BrokenModel, match=r"lm_head.weight"):
        load_model(str(damaged.folder))


def test_damaged_files_are_named(damaged):
    for size in (0, 4, 5000, damaged.weights.stat().st_size - 1):
        os.truncate(damaged.weights, min(size, damaged.weights.stat().st_size))
        with pytest.raises(BrokenModel, match=r"model.safetensors is damaged"):
            load_model(str(damaged.folder))
        damaged.save(damaged.tensors)
    for file, text in (("tokenizer.json", "{"), ("config.json", "{"), ("config.json", "[]")):
        before = (damaged.folder / file).read_text()
        (damaged.folder / file).write_text(text)
        with pytest.raises(BrokenModel, match=file if file == "config.json" else "tokenizer"):
            load_model(str(damaged.folder))
        (damaged.folder / file).write_text(before)
    (damaged.folder / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match="no tokenizer"):
        load_model(str(damaged.folder))


def test_impossible_config_values_are_broken_and_not_a_traceback(damaged):
    for entries in ({"hidden_size": "wide"}, {"num_hidden_layers": -1}, {"num_attention_heads": 0}):
        config = json.loads((damaged.folder / "config.json").read_text()) | entries
        (damaged.folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(PopError):
            load_model(str(damaged.folder))


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_folder(tmp_path, "llama", max_shard_size="50KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    load_model(str(folder))
    shards[-1].unlink()
    with pytest.raises(BrokenModel, match=f"{shards[-1].name} is missing"):
        load_model(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BrokenModel, match="weight_map"):
        load_model(str(folder))


def test_pickles_are_not_read(damaged):
    damaged.weights.unlink()
    with pytest.raises(BrokenModel, match="no weights"):
        load_model(str(damaged.folder))
    torch.save(damaged.tensors, damaged.folder / "pytorch_model.bin")
    with pytest.raises(BrokenModel, match="pickles"):
        load_model(str(damaged.folder))


@pytest.mark.parametrize("config", (GPT2Config(), MambaConfig(), T5Config()), ids=lambda c: c.model_type)
def test_other_architectures_are_refused_from_the_config(config, tmp_path):
    """C14."""
    with pytest.raises(UnsupportedModel) as raised:
        load_model(str(config_folder(tmp_path, config)))
    assert f"'{config.model_type}'" in str(raised.value) and supported_families() in str(raised.value)


@pytest.mark.parametrize(
    "entries",
    [
        dict(num_hidden_layers=1_000_000_000),
        dict(num_hidden_layers=0),
        dict(num_attention_heads=-1),
        dict(num_key_value_heads=0),
        dict(num_key_value_heads=3),
        dict(head_dim=0),
        dict(intermediate_size=-1),
        dict(vocab_size=-1),
        dict(max_position_embeddings=0),
        dict(hidden_act="nope"),
        dict(model_type=["a"]),
        dict(rope_parameters=dict(rope_type="nope", rope_theta=1.0)),
    ],
    ids=str,
)
def test_impossible_configs_are_one_sentence(damaged, entries):
    file = damaged.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises((UnsupportedModel, BrokenModel)) as caught:
        load_model(str(damaged.folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_not_floats_are_named(damaged, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    damaged.save(damaged.tensors | {name: damaged.tensors[name].to(dtype)})
    with pytest.raises(BrokenModel, match=name):
        load_model(str(damaged.folder))


def test_code_in_a_folder_is_never_run(damaged, tmp_path, monkeypatch):
    """C11: neither for an architecture that transformers knows, nor for one that only the code would define."""
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("somebody asked"))
    for name in ("configuration_own.py", "modeling_own.py", "tokenization_own.py"):
        (damaged.folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    config = json.loads((damaged.folder / "config.json").read_text()) | {"auto_map": own}
    (damaged.folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((damaged.folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}
    (damaged.folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert type(load_model(str(damaged.folder)).model).__module__.startswith("transformers.")
    (damaged.folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    with pytest.raises(UnsupportedModel, match=r"'own' .*never run"):
        load_model(str(damaged.folder))
    assert not (tmp_path / "ran").exists()


def test_memory_is_checked_before_the_weights(tmp_path, monkeypatch):
    folder = config_folder(tmp_path, tiny_model("llama").config)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match=r"float32 needs about .* GB"):
        load_model(str(folder))


def test_gemma_is_not_run_in_float16(tmp_path):
    """C15."""
    folder = config_folder(tmp_path, tiny_model("gemma3").config)
    with pytest.raises(PopError, match="float16"):
        load_model(str(folder), dtype="float16")
