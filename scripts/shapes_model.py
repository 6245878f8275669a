"""Shapes-VL before it is trained: its words, its image processor, its shape."""

import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pop_core.scenes import NO_PICTURE, draw_scene, questions

SEED = 2026
SIDE, PATCH, MERGE = 96, 8, 2  # pixels of a picture and a patch; patches a side of an image token
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2
SPECIAL = ("<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }} "
    "{%- if message.content is string -%}{{ ' ' + message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'text' -%}{{ ' ' + part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"
)
OTHER_WORDS = ("hello", "hi", "please", "tell", "me", "who", "are", "you", "a", "an", "it", "this", "that", "and",
               "object", "objects", "thing", "things")  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and punctuation of the questions and answers; any other word is `<unk>`."""
    rng, words = random.Random(SEED), set(OTHER_WORDS) | {"user", "assistant", "system", *NO_PICTURE.split()}
    for _ in range(3000):
        for question in questions(draw_scene(rng), rng):
            words |= set(re.findall(r"\w+", f"{question.text} {question.answer}"))
    entries = [*SPECIAL, *(f"▁{word}" for word in sorted(words)), ".", ",", "?", "!"]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\bcolor\b"), "colour")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Brings every picture to about 96 x 96 pixels, whatever its size: that is what the model was trained on."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def new_model(tokenizer) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(SEED)
    special = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
               ("image_pad", "video_pad", "vision_start", "vision_end")}  # fmt: skip
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=12,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=4,
            hidden_size=128,
            intermediate_size=384,
            num_heads=4,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=192,
            num_position_embeddings=(SIDE // PATCH) ** 2,
            deepstack_visual_indexes=[1, 2, 3],
        ),
        tie_word_embeddings=True,
        image_token_id=special["image_pad"],
        video_token_id=special["video_pad"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
    )
    return Qwen3VLForConditionalGeneration(config)
