"""Tiny models as folders on disk, with a real fast tokenizer, for whatever loads a model by name."""

import json
from pathlib import Path

from tiny import SHAPE, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]  # ids 0, 1, 2, as in SHAPE
MERGES = [("t", "h")]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(add_bos: bool = True, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE like the big ones, in SHAPE's 97 ids: printable ASCII, the line break and one merge.

    There is no room for `|`, `}`, `~` and what is not ASCII: they are dropped.
    """
    alphabet = [chr(code) for code in range(33, 124)] + ["Ġ", "Ċ"]  # as byte-level BPE spells space and line break
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *map("".join, MERGES)])}
    assert len(vocab) == SHAPE["vocab_size"]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def tiny_folder(path, family: str, seed: int = 0, add_bos: bool = True, chat: bool = True, **save) -> Path:
    """Save `tiny_model(family)` and its tokenizer to `path`; `save` goes to `save_pretrained` (max_shard_size)."""
    path = Path(path)
    tiny_model(family, seed).save_pretrained(path, **save)
    tiny_tokenizer(add_bos, chat).save_pretrained(path)
    return path


def config_folder(path, config, **entries):
    """A folder with a config.json and nothing else: whatever goes past the config fails on the missing weights."""
    config.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path
