"""C05, C06, C16: a GGUF file gives the same logits as the weights it was made from, or is refused by name."""

import math

import numpy as np
import pytest
import torch
from tiny import SHAPE, random_ids, tiny_model
from tiny_files import tiny_tokenizer
from tiny_gguf import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from pop_core import gguf_model
from pop_core.errors import BrokenModel, ModelNotFound, UnsupportedModel
from pop_core.families import read_spec
from pop_core.gguf_reader import read_gguf
from pop_core.gguf_tokenizer import read_tokenizer

FAMILIES = {"llama": "llama", "llama-tied": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"} | {
    "gemma3": "gemma3",
    "gemma3-softcap": "gemma3",
}


def load(path, dtype=torch.float32):
    file = read_gguf(path)
    return gguf_model.load_weights(file, gguf_model.read_config(file), dtype)


def logits(model):
    with torch.no_grad():
        return model(random_ids(20)).logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = tiny_model("llama")
    return model, write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", model, "llama")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_weights_in_the_file(name, tmp_path):
    model = tiny_model(name)
    extra = {}
    if name.startswith("gemma3"):
        model.config.query_pre_attn_scalar = model.config.head_dim  # a file cannot say another one
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
        extra = {"gemma3.final_logit_softcapping": model.config.final_logit_softcapping}
    path = write_gguf(tmp_path / "m.gguf", model, FAMILIES[name], extra)
    loaded = load(path)
    assert (logits(loaded) - logits(model)).abs().max() <= 1e-3
    assert read_spec(loaded.config).layer_types == read_spec(model.config).layer_types
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize("factor", (8.0, 32.0))
def test_llama_3_rope_scaling_is_read_from_its_factors(factor, tmp_path):
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    rope["original_max_position_embeddings"] = 8192
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**SHAPE | {"max_position_embeddings": 65536}, head_dim=8, rope_parameters=rope)
    )
    path = write_gguf(tmp_path / "m.gguf", model, "llama", tensors={"rope_freqs.weight": _llama3_factors(factor)})
    loaded = load(path)
    assert torch.allclose(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert (logits(loaded) - logits(model)).abs().max() <= 1e-3


def test_other_rope_factors_are_refused(llama, tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", llama[0], "llama", tensors={"rope_freqs.weight": np.float32([1.0, 1.5, 2.0, 4.0])}
    )
    with pytest.raises(UnsupportedModel, match="RoPE factors"):
        load(path)


def test_linear_scaling_is_kept_and_yarn_refused(llama, tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = gguf_model.read_config(read_gguf(write_gguf(tmp_path / "a.gguf", llama[0], "llama", scaling)))
    assert config.rope_parameters["rope_type"] == "linear" and config.rope_parameters["factor"] == 4.0
    scaling["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(UnsupportedModel, match="yarn"):
        gguf_model.read_config(read_gguf(write_gguf(tmp_path / "b.gguf", llama[0], "llama", scaling)))


def test_blocks_are_unpacked_to_the_dtype_asked_for(llama, tmp_path):
    file = read_gguf(write_gguf(tmp_path / "q.gguf", llama[0], "llama", quantised=True))
    assert file.quantised and not read_gguf(llama[1]).quantised
    model = gguf_model.load_weights(file, gguf_model.read_config(file), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (logits(model.float()) - logits(llama[0])).abs().max() < 0.5


@pytest.mark.parametrize("architecture", ("qwen3vl", "qwen35", "gpt2", "clip", ""))
def test_unknown_architectures_are_refused_by_name(architecture, llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama[0], "llama", {"general.architecture": architecture})
    with pytest.raises(UnsupportedModel, match=f"'{architecture}'"):
        gguf_model.read_config(read_gguf(path))


@pytest.mark.parametrize(
    "metadata, said", [({"llama.expert_count": 8}, "experts"), ({"split.count": 3}, "one of 3 parts")]
)
def test_what_a_family_does_not_cover_is_refused(metadata, said, llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama[0], "llama", metadata)
    with pytest.raises(UnsupportedModel, match=said):
        gguf_model.read_config(read_gguf(path))


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"blk.3.ffn_up.weight": None}, "lacks tensors: blk.3.ffn_up.weight"),
        ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "unknown tensors: blk.0.attn_q.bias"),
        ({"blk.1.ffn_up.weight": np.zeros((5, 5), np.float32)}, "layers.1.mlp.up_proj.weight"),
        ({"token_embd.weight": None}, "token_embd.weight"),
    ],
)
def test_every_tensor_is_used_and_none_is_missing(tensors, said, llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama[0], "llama", tensors=tensors)
    with pytest.raises(BrokenModel, match=said):
        load(path)


def test_a_file_cut_off_anywhere_is_refused_with_its_name(llama, tmp_path):
    whole = llama[1].read_bytes()
    for size in (0, 3, 20, 100, 1000, len(whole) // 2, len(whole) - 1):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(BrokenModel, match=f"{size}.gguf"):
            read_gguf(path)


def test_random_damage_to_the_header_never_escapes_as_another_error(llama, tmp_path):
    whole, rng = bytearray(llama[1].read_bytes()), np.random.default_rng(0)
    path, refused = tmp_path / "damaged.gguf", 0
    for _ in range(200):
        damaged = bytearray(whole)
        for place in rng.integers(0, 3000, 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
            gguf_model.tensor_names(file, gguf_model.read_config(file))
        except (BrokenModel, UnsupportedModel):
            refused += 1
    assert refused > 20  # most places are text, where damage is only another name


def test_a_missing_file_and_a_missing_entry_are_named(llama, tmp_path):
    with pytest.raises(ModelNotFound, match=r"nothing.gguf"):
        read_gguf(tmp_path / "nothing.gguf")
    path = write_gguf(tmp_path / "m.gguf", llama[0], "llama", {"llama.block_count": None})
    with pytest.raises(BrokenModel, match=r"llama.block_count"):
        gguf_model.read_config(read_gguf(path))


def test_the_tokenizer_is_the_one_described(llama):
    tokenizer, notices = read_tokenizer(read_gguf(llama[1]))
    expected = tiny_tokenizer()
    for text in ("Hello there, 12 moths!", " a\nb ", ""):
        assert tokenizer(text).input_ids == expected(text).input_ids
    assert tokenizer("x").input_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.chat_template == expected.chat_template and not notices


def test_a_splitting_rule_is_applied_or_a_notice_says_that_it_is_not(llama, tmp_path):
    smollm = read_gguf(write_gguf(tmp_path / "s.gguf", llama[0], "llama", {"tokenizer.ggml.pre": "smollm"}))
    tokenizer, notices = read_tokenizer(smollm)
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"] and not notices  # GPT-2's own rule leaves "Ġ12" in one piece
    strange = read_gguf(write_gguf(tmp_path / "t.gguf", llama[0], "llama", {"tokenizer.ggml.pre": "novel"}))
    assert "novel" in read_tokenizer(strange)[1][0]


def test_every_way_to_end_a_turn_stops_generation(llama, tmp_path):
    tokens = tiny_tokenizer().convert_ids_to_tokens(list(range(97)))
    tokens[50] = "<end_of_turn>"
    path = write_gguf(
        tmp_path / "m.gguf", llama[0], "llama", {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 40}
    )
    assert load(path).generation_config.eos_token_id == [2, 40, 50]


def _llama3_factors(factor: float, head_dim: int = 8, theta: float = 5e5) -> np.ndarray:
    """llama.cpp's `generate_extra_tensors` for Llama 3, written down from its converter."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.float32(factors)
