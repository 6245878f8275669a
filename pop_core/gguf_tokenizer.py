"""The tokenizer that a GGUF file describes, with what `transformers` leaves out of it put right."""

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from .errors import BrokenModel
from .gguf_reader import GgufFile

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
GPT2_SPLITS = (None, "default", "gpt-2")  # what a byte-level tokenizer does unless told otherwise
DIGITS_APART = ("smollm",)  # GPT-2's rule after every digit is set apart; unknown to transformers


def read_tokenizer(file: GgufFile) -> tuple[PreTrainedTokenizerFast, tuple[str, ...]]:
    """The tokenizer, and notices about what may differ from the original one.

    Raises `BrokenModel` when the file has no vocabulary or one of an unknown kind.
    """
    entries = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}
    described = {ours: entries[key] for key, ours in GGUF_TOKENIZER_MAPPING["tokenizer"].items() if key in entries}
    tokens, kind = described.get("tokens"), described.get("tokenizer_type")
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, described)
        special = {name: tokens[i] for name, part in SPECIAL.items() if (i := _special(entries, part)) is not None}
    except Exception as error:  # the Rust behind it raises bare ones
        raise BrokenModel(f"{file.path}: its tokenizer cannot be rebuilt ({error}).") from None
    notices = ()
    split = described.get("pre_tokenizer_type")
    if kind == "gpt2" and split in DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind == "gpt2" and split not in GPT2_SPLITS and split not in GGUF_PRE_TOKENIZER_SPLITS:
        notices = (f"The tokenizer's splitting rule '{split}' is unknown; some texts may be cut into other tokens.",)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=bool(entries.get("ggml.add_bos_token", kind == "llama")),
        add_eos_token=bool(entries.get("ggml.add_eos_token", False)),
        chat_template=entries.get("chat_template"),
        **special,
    ), notices


def _special(entries: dict, part: str) -> int | None:
    return entries.get(f"ggml.{part}_token_id")
