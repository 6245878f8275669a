"""Tiny random models of every family, small enough for a law to be checked in milliseconds."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MIXTURE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
WINDOW = 8  # so that a prompt of a dozen tokens is longer than it

MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=8)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=8, attention_bias=True, mlp_bias=True)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=1e4,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24)
    ),
    "gemma3-softcap": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=WINDOW, final_logit_softcapping=5.0)
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **MIXTURE, shared_expert_intermediate_size=40, mlp_only_layers=[1])
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **MIXTURE, head_dim=16, norm_topk_prob=True, decoder_sparse_step=2)
    ),
}


def tiny_model(name: str, seed: int = 0):
    """A random model in float32 whose every weight differs from its initial constant (norm gains, biases)."""
    torch.manual_seed(seed)
    return randomised(MAKERS[name]())


def randomised(model):
    """The model in eval mode, moved away from its initial weights."""
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.requires_grad_(False)


def random_ids(count: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Token ids without the special ones, `[batch, count]`."""
    return torch.randint(3, SHAPE["vocab_size"], (batch, count), generator=torch.Generator().manual_seed(seed))
