"""Tiny models as GGUF files, written the way llama.cpp's converter does; the inverse of `pop_core.gguf_model`."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny_files import CHAT_TEMPLATE, MERGES, SPECIAL, tiny_tokenizer

from pop_core.gguf_model import HEAD, LAYER_TENSORS, OUTSIDE

CONTROL, NORMAL = 3, 1


def write_gguf(
    path, model, architecture: str, metadata: dict | None = None, tensors: dict | None = None, quantised: bool = False
) -> Path:
    """Write `model` with the tiny tokenizer; `metadata` and `tensors` add entries, or leave out those that are None.

    `quantised` stores the FFN matrices whose rows allow it as Q8_0 blocks, everything else is float32.
    """
    config, a = model.config, architecture
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    entries = {
        "general.architecture": a,
        f"{a}.block_count": config.num_hidden_layers,
        f"{a}.context_length": config.max_position_embeddings,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": config.num_key_value_heads,
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{a}.attention.key_length": getattr(config, "head_dim", None),
        f"{a}.attention.sliding_window": config.sliding_window if a == "gemma3" else None,
        f"{a}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tiny_tokenizer().convert_ids_to_tokens(list(range(config.vocab_size))),
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (config.vocab_size - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    writer = GGUFWriter(path, None)
    for key, value in {**entries, **(metadata or {})}.items():
        _add_entry(writer, key, value)
    for name, value in {**_tensors(model, a), **(tensors or {})}.items():
        if value is None:
            continue
        if quantised and "ffn_" in name and value.ndim == 2 and value.shape[-1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_entry(writer: GGUFWriter, key: str, value) -> None:
    if value is None or (key == "general.architecture" and writer.arch):
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(model, architecture: str) -> dict[str, np.ndarray]:
    names = dict(OUTSIDE) if model.config.tie_word_embeddings else OUTSIDE | HEAD
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS[architecture].items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    weights = model.state_dict()
    return {
        ours: _as_written(architecture, model.config, ours, weights[theirs].numpy()) for ours, theirs in names.items()
    }


def _as_written(architecture: str, config, name: str, weight: np.ndarray) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, and its `+ 1` on Gemma's norms."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
    return weight
