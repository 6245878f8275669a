"""Tiny random models that see, and folders with all that loading one wants."""

from pathlib import Path

import torch
from PIL import Image
from tiny import MIXTURE, SHAPE, WINDOW, randomised
from tiny_files import tiny_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(SHAPE["vocab_size"], SHAPE["vocab_size"] + 4)  # after the tiny tokenizer's own
TEXT = SHAPE | {"vocab_size": SHAPE["vocab_size"] + 4, "max_position_embeddings": 4096, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PATCH, MERGE = 4, 2
QWEN_VISION = dict(depth=3, hidden_size=16, num_heads=2, patch_size=PATCH, spatial_merge_size=MERGE)
QWEN3_VISION = QWEN_VISION | dict(
    intermediate_size=24, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]
)
QWEN_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
GEMMA_TOKENS = 4  # of every picture: a 16 x 16 picture in 4 x 4 patches, pooled two by two
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _gemma(window: int):
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=TEXT | dict(sliding_window=window, query_pre_attn_scalar=24),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=4,
                vision_use_head=False,
            ),
            mm_tokens_per_image=GEMMA_TOKENS,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        )
    )


SEEING_MAKERS = {
    "qwen3-vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=TEXT | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
            vision_config=QWEN3_VISION,
            **QWEN_IDS,
        )
    ),
    "qwen3-vl-moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config=TEXT
            | MIXTURE
            | {"rope_parameters": ROPE | {"mrope_interleaved": True}, "decoder_sparse_step": 2},
            vision_config=QWEN3_VISION,
            **QWEN_IDS,
        )
    ),
    "qwen2.5-vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={k: v for k, v in TEXT.items() if k != "head_dim"}
            | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
            vision_config=QWEN_VISION
            | dict(intermediate_size=24, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]),
            **QWEN_IDS,
        )
    ),
    "gemma3-vl": lambda: _gemma(WINDOW),
    "gemma3-vl-narrow": lambda: _gemma(3),  # a window shorter than a picture
}


def tiny_seeing_model(name: str, seed: int = 0):
    """A random model in float32 whose every weight differs from its initial constant."""
    torch.manual_seed(seed)
    return randomised(SEEING_MAKERS[name]())


def image_processor(name: str):
    """As the big models of the family have it, for tiny pictures."""
    if name.startswith("gemma"):
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=GEMMA_TOKENS)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size)


def seeing_tokenizer(name: str, **options):
    tokenizer = tiny_tokenizer(**options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)}, replace_extra_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [START, END, IMAGE, VIDEO]
    placeholder = SPECIAL[0] if name.startswith("gemma") else "".join((SPECIAL[0], SPECIAL[2], SPECIAL[1]))
    if tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return tokenizer


def seeing_folder(path, name: str, seed: int = 0, **options) -> Path:
    """Save the model, its tokenizer and its image processor to `path`."""
    path = Path(path)
    tiny_seeing_model(name, seed).save_pretrained(path)
    seeing_tokenizer(name, **options).save_pretrained(path)
    image_processor(name).save_pretrained(path)
    return path


def scribble(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.byte().numpy(), "RGB")
