"""One `DecoderSpec` per architecture, read from the config before any weight is.

Everything that the decoder loop needs to know about a family is a field here; the loop itself has no family names.
"""

from dataclasses import dataclass

from .errors import UnsupportedModel

MOST_LAYERS, MOST = 1000, 10_000_000  # of layers, and of any other size, that a config may ask for
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DecoderSpec:
    """The shape and the habits of one decoder-only language model.

    `layer_types[i]` is `FULL` or `SLIDING`; a sliding layer sees the last `window` tokens, itself included.
    `softmax_scale` multiplies query-key products. `qk_norm`: queries and keys are normalised per head before RoPE.
    `post_norms`: each branch is normalised again before it joins the residual stream (Gemma 3).
    `norm_offset`: an RMS norm multiplies by `norm_offset + weight` (1 for Gemma). `rope_by_type`: sliding and full
    layers rotate with different bases (Gemma 3). `logit_softcap`: logits pass through `cap * tanh(x / cap)`.
    `tied`: the head and the embedding are one matrix.

    `ffn`: channels of a dense layer's FFN. Layers in `sparse` are mixtures instead: `experts` FFNs of `expert_ffn`
    channels, of which a token passes `experts_per_token`, and one of `shared_ffn` (0: none) that all tokens pass.

    `sees`: the model takes pictures (`vision.py`). `deepstack`: after how many of the first layers more of a picture is
    added to its tokens. `image_blocks`: the tokens of one picture see each other both ways.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    layer_types: tuple[str, ...]
    window: int | None
    softmax_scale: float
    rms_eps: float
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    rope_by_type: bool = False
    logit_softcap: float | None = None
    tied: bool = False
    sparse: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    sees: bool = False
    deepstack: int = 0
    image_blocks: bool = False

    @property
    def kv_width(self) -> int:
        """Channels of the keys (and of the values) of one token in one layer."""
        return self.kv_heads * self.head_dim

    def ffn_widths(self, layer: int) -> list[int]:
        """Channels of each FFN of a layer: its one, or its experts and then the shared one."""
        if layer not in self.sparse:
            return [self.ffn]
        return [self.expert_ffn] * self.experts + [self.shared_ffn] * bool(self.shared_ffn)

    def layer_window(self, layer: int) -> int | None:
        """Tokens a layer sees, or None when it sees all of them."""
        return self.window if self.layer_types[layer] == SLIDING else None


# model_type in config.json -> the name people know it by
FAMILIES = {
    "llama": "Llama (2, 3, SmolLM)",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma 3 (text)",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "gemma3": "Gemma 3 (text and images)",
}
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3")


ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


def supported_families() -> str:
    """The families in one phrase, for messages."""
    names = list(FAMILIES.values())
    return ", ".join(names[:-1]) + " and " + names[-1]


def read_spec(config) -> DecoderSpec:
    """The spec of a `transformers` config. Raises `UnsupportedModel` for anything the decoder would get wrong."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModel(f"The architecture '{family}' is not supported; use one of {supported_families()}.")
    tied, sees = bool(config.tie_word_embeddings), family in SEEING
    vision = config.vision_config if sees else None
    config = config.get_text_config()
    _refuse_impossible_shapes(config)
    _refuse_unsupported_options(config)
    gemma = family.startswith("gemma3")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return DecoderSpec(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        layer_types=_layer_types(config),
        window=getattr(config, "sliding_window", None),
        softmax_scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        rms_eps=config.rms_norm_eps,
        qk_norm=family.startswith(("qwen3", "gemma3")),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        rope_by_type=gemma,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        tied=tied,
        sees=sees,
        deepstack=len(getattr(vision, "deepstack_visual_indexes", ())),
        image_blocks=family == "gemma3",
        **(_mixture(config) if family.endswith("_moe") else {}),
    )


def check_layers(count) -> None:
    """Before a config class makes a list of them. Raises `UnsupportedModel`."""
    _check_count("layers", count, MOST_LAYERS)


def _check_count(name: str, value, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModel(f"The number of {name} in the config is {str(value)[:40]}; it must be 1 to {most:,}.")


def _refuse_impossible_shapes(config) -> None:
    heads = config.num_attention_heads
    for name, value, most in (
        ("layers", config.num_hidden_layers, MOST_LAYERS),
        ("attention heads", heads, MOST),
        ("key-value heads", config.num_key_value_heads, MOST),
        ("hidden channels", config.hidden_size, MOST),
        ("channels a head", 1 if getattr(config, "head_dim", None) is None else config.head_dim, MOST),
        ("FFN channels", config.intermediate_size, MOST),
        ("vocabulary entries", config.vocab_size, MOST),
        ("positions", config.max_position_embeddings, 2**40),
    ):
        _check_count(name, value, most)
    if heads % config.num_key_value_heads:
        raise UnsupportedModel(f"{heads} attention heads cannot share {config.num_key_value_heads} key-value heads.")


def _mixture(config) -> dict:
    """The fields of a mixture of experts. Raises `UnsupportedModel`."""
    used, experts = config.num_experts_per_tok, config.num_experts
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    for name, value in (("experts", experts), ("expert channels", config.moe_intermediate_size)):
        _check_count(name, value, MOST)
    if not isinstance(used, int) or not 1 <= used <= experts:
        raise UnsupportedModel(f"A token passes {str(used)[:40]} experts in the config; it must be 1 to {experts}.")
    if config.model_type == "qwen2_moe":
        _check_count("shared expert channels", shared, MOST)
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    _check_count("layers from one mixture to the next", step, MOST_LAYERS)
    return {
        "sparse": tuple(i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0),
        "experts": experts,
        "experts_per_token": used,
        "expert_ffn": config.moe_intermediate_size,
        "shared_ffn": shared,
    }


def _layer_types(config) -> tuple[str, ...]:
    if config.model_type in ("mistral", "qwen3_moe"):  # no list: a window, where there is one, holds for all layers
        return (SLIDING if config.sliding_window else FULL,) * config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    return tuple(types) if types else (FULL,) * config.num_hidden_layers


def _refuse_unsupported_options(config) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part["rope_type"] for part in (rope, *rope.values()) if isinstance(part, dict) and "rope_type" in part}
    if others := kinds - ROPE_TYPES:  # 'dynamic' and 'longrope' rewrite the model's frequencies as a prompt grows
        raise UnsupportedModel(
            f"RoPE scaling of type '{others.pop()}' is not supported; 'default', 'linear', 'llama3' and 'yarn' are."
        )
    from transformers.activations import ACT2FN  # here: a page reads a spec without importing torch

    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in ACT2FN:
        raise UnsupportedModel(f"The activation '{activation}' is unknown.")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel("Attention with logit soft-capping (as in Gemma 2) is not supported.")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("A model with bidirectional attention cannot be run as a decoder.")
    window = getattr(config, "sliding_window", None)
    if SLIDING in _layer_types(config) and not (isinstance(window, int) and window > 0):
        raise UnsupportedModel(f"The sliding window is {window}; it must be a positive number of tokens.")
    unknown = set(_layer_types(config)) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModel(f"Layers of type '{unknown.pop()}' are not supported; '{FULL}' and '{SLIDING}' are.")
