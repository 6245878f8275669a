"""From a GGUF file to a `transformers` config, model and tokenizer, for the families whose decoder we run.

`from_pretrained(gguf_file=...)` is not used: it skips every tensor that it cannot name, and drops RoPE scaling and
head widths, so a wrong model comes out that still writes fluent text. Here a file is understood to its last tensor
or refused, and `tests/test_gguf.py` holds each family's logits against the same weights in safetensors.
"""

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .checkpoint import check_tensors, clear_errors, quiet
from .errors import BrokenModel, PopError, UnsupportedModel
from .families import check_layers
from .gguf_reader import GgufFile

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}

# name in the file -> name in transformers; `{i}` is the layer
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEAD = {"output.weight": "lm_head.weight"}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
QKV_BIAS = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
QK_NORM = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
POST_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
LAYER_TENSORS = {
    "llama": LAYER,
    "qwen2": LAYER | QKV_BIAS,
    "qwen3": LAYER | QK_NORM,
    "gemma3": LAYER | QK_NORM | POST_NORMS,
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling, as one divisor per pair of channels
GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose softmax scale is not head_dim ** -0.5; its file does not say so
GEMMA_LOCAL_THETA = 10_000.0
# what a model says at the end of its turn or text; files name one of them as eos and forget the others
END_TOKENS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"}


def read_config(file: GgufFile):
    """The `transformers` config that the file describes. Raises `UnsupportedModel` or `BrokenModel`."""
    kind = file.architecture
    if kind not in CONFIGS:
        raise UnsupportedModel(
            f"GGUF files of the architecture '{kind}' are not supported; those of {', '.join(CONFIGS)} are."
        )
    if file.get("expert_count", 0):
        raise UnsupportedModel("GGUF files with a mixture of experts are not supported; use the safetensors model.")
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(f"{file.path} is one of {parts} parts; join them with llama-gguf-split --merge.")
    try:
        check_layers(file.metadata[f"{kind}.block_count"])
        return CONFIGS[kind](**_shape(file), **_gemma(file), rope_parameters=_rope(file))
    except PopError:
        raise
    except KeyError as error:
        raise BrokenModel(f"{file.path}: the entry {error} is missing from its metadata.") from None
    except (TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise BrokenModel(f"{file.path}: its metadata does not describe a model ({error}).") from None


def _shape(file: GgufFile) -> dict:
    """What all families have in common."""
    need, token = lambda key: file.metadata[f"{file.architecture}.{key}"], file.metadata.get
    heads = need("attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise BrokenModel(f"{file.path}: the tensor 'token_embd.weight' is missing.")
    return dict(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=need("embedding_length"),
        intermediate_size=need("feed_forward_length"),
        num_hidden_layers=need("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.get("attention.head_count_kv", heads),
        head_dim=_head_dim(file),
        max_position_embeddings=need("context_length"),
        rms_norm_eps=float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=token("tokenizer.ggml.bos_token_id"),
        eos_token_id=token("tokenizer.ggml.eos_token_id"),
        pad_token_id=token("tokenizer.ggml.padding_token_id"),
    )


def _head_dim(file: GgufFile) -> int:
    equal = file.get("embedding_length", 0) // file.get("attention.head_count", 1)
    width = file.get("attention.key_length", equal)
    if file.get("rope.dimension_count", width) != width or file.get("attention.value_length", width) != width:
        raise UnsupportedModel("GGUF files with partial RoPE, or values narrower than keys, are not supported.")
    return width


def _gemma(file: GgufFile) -> dict:
    if file.architecture != "gemma3":
        return {}
    layers, pattern = file.get("block_count", 0), file.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    scalar = file.get("attention.key_length", 256)
    if layers == GEMMA_27B_LAYERS:
        scalar = file.get("embedding_length") // file.get("attention.head_count")
    return dict(
        query_pre_attn_scalar=scalar,
        sliding_window=file.metadata["gemma3.attention.sliding_window"],
        layer_types=["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]],
        final_logit_softcapping=file.get("final_logit_softcapping"),
    )


def _rope(file: GgufFile) -> dict:
    gemma = file.architecture == "gemma3"
    rope = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 1e6 if gemma else 1e4))}
    scaling = file.get("rope.scaling.type", "linear" if file.get("rope.scaling.factor") else "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": float(file.metadata[f"{file.architecture}.rope.scaling.factor"])}
    elif scaling != "none":
        raise UnsupportedModel(f"GGUF files with RoPE scaling of type '{scaling}' are not supported.")
    if ROPE_FACTORS in file.tensors:
        rope = _llama3_rope(file, rope)
    if not gemma:
        return rope
    local = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", GEMMA_LOCAL_THETA))}
    return {"full_attention": rope, "sliding_attention": local}


def _llama3_rope(file: GgufFile, rope: dict) -> dict:
    """The file holds the scaling's result; every published Llama 3 has these constants, and the result proves it."""
    divisors = file.read(ROPE_FACTORS)
    scaled = rope | dict(
        rope_type="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    width = _head_dim(file)
    config = LlamaConfig(hidden_size=width, num_attention_heads=1, head_dim=width, rope_parameters=scaled)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
    if divisors.shape != plain.shape or not np.allclose(plain / divisors, frequencies.numpy(), rtol=1e-4):
        raise UnsupportedModel("The RoPE factors of this GGUF file are not those of Llama 3, the only ones supported.")
    return scaled


def tensor_names(file: GgufFile, config) -> dict[str, str]:
    """Name in the file -> name in the model, for every tensor the model needs.

    Raises `BrokenModel` when the file has other tensors than these, fewer or more.
    """
    names = OUTSIDE | ({} if config.tie_word_embeddings else HEAD)
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS[file.architecture].items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    for fault, wrong in (
        ("lacks", sorted(names.keys() - file.tensors.keys())),
        ("has unknown", sorted(file.tensors.keys() - names.keys() - {ROPE_FACTORS})),
    ):
        if wrong:
            raise BrokenModel(f"{file.path} {fault} tensors: {', '.join(wrong[:3])} ({len(wrong)} in all).")
    return names


def load_weights(file: GgufFile, config, dtype: torch.dtype, progress=None, **placement):
    """The model with dequantised weights in `dtype`, on the CPU unless `placement` has a `device_map`.

    Raises `BrokenModel` when a tensor is missing, unknown, of the wrong shape or in a format that cannot be unpacked.
    """
    names = tensor_names(file, config)
    state = {}
    for done, (ours, theirs) in enumerate(names.items()):
        if progress:
            progress(done / len(names), f"Unpacking {ours}")
        state[theirs] = torch.from_numpy(_undo(file, config, ours)).to(dtype)
    with quiet(), clear_errors(file.path):
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **placement,
        )
    check_tensors(file.path, info)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=_end_tokens(file), pad_token_id=config.pad_token_id
    )
    return model


def _undo(file: GgufFile, config, name: str) -> np.ndarray:
    """One tensor as transformers wants it: llama.cpp interleaves Llama's rotary pairs and adds 1 to Gemma's norms."""
    weight = file.read(name)
    if file.architecture == "gemma3" and name.endswith("norm.weight"):
        return weight - 1
    if file.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
    return weight


def _end_tokens(file: GgufFile) -> list[int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    ids = {i for i, token in enumerate(tokens) if token in END_TOKENS}
    ids |= {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    return sorted(ids - {None})
