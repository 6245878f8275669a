"""From what a person typed to token ids: cleaning, chat template, exactly one BOS, lengths."""

import threading
import time
import unicodedata
from dataclasses import dataclass

from .errors import PopError

MAX_CHARACTERS = 1_000_000  # tokenising more than this would keep the machine busy before any limit is checked
_SLOT = "\u2063pop-studio-user-text\u2063"  # where the user's text goes while the template is rendered
_tokenizer_lock = threading.Lock()  # `split_special_tokens` is a switch on the shared tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run: the cleaned text, its token ids, whether the chat template was used, and notices.

    ms: how long cleaning and tokenising took.
    """

    text: str
    ids: tuple[int, ...]
    chat: bool
    notices: tuple[str, ...]
    ms: float


def encode_prompt(tokenizer, text: str, chat: bool | None = None) -> Prompt:
    """Tokenise a user's text. chat: None takes the chat template where the model has one.

    Special-token text typed by the user is text, never a control token. Raises `PopError` for empty prompts, for a
    prompt over `MAX_CHARACTERS`, and for `chat=True` on a model without a template.
    """
    start = time.perf_counter()
    text, notices = clean(text)
    if not text.strip():
        raise PopError("The prompt is empty; type some text.")
    if len(text) > MAX_CHARACTERS:
        raise PopError(f"The prompt has {len(text):,} characters; at most {MAX_CHARACTERS:,} are accepted.")
    has_template = bool(tokenizer.chat_template)
    if chat and not has_template:
        raise PopError("This model has no chat template; run it with a plain prompt.")
    chat = has_template if chat is None else chat
    with _tokenizer_lock:
        ids = _chat_ids(tokenizer, text) if chat else _plain_ids(tokenizer, text)
    if not ids:
        raise PopError("The prompt has no tokens; type some text.")
    return Prompt(text, tuple(ids), chat, notices, (time.perf_counter() - start) * 1e3)


def encode_text(tokenizer, text: str) -> list[int]:
    """A document's ids without BOS or template, special-token text as text (for calibration and quality)."""
    with _tokenizer_lock:
        return tokenizer(clean(text)[0], add_special_tokens=False, split_special_tokens=True)["input_ids"]


def bos_ids(tokenizer) -> list[int]:
    """The ids that this model expects in front of any text: its BOS, or nothing."""
    with _tokenizer_lock:
        ids = tokenizer("a")["input_ids"]
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []


def clean(text: str) -> tuple[str, tuple[str, ...]]:
    """Text without what is not text, and a notice if anything was replaced by U+FFFD.

    Replaced: NUL, control characters other than tab and line ends, and lone surrogates.
    """
    if not isinstance(text, str):
        raise PopError("The prompt must be text.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = ["\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text]
    cleaned = "".join(parts)
    count = sum(a != b for a, b in zip(text, cleaned, strict=True))
    if not count:
        return cleaned, ()
    what = "1 character that is not text was" if count == 1 else f"{count} characters that are not text were"
    return cleaned, (f"{what} replaced by \ufffd (NUL, control characters or half a surrogate pair).",)


def _chat_ids(tokenizer, text: str) -> list[int]:
    """Ids of one user turn in the model's chat format.

    The user's text is split off only when it spells special tokens: otherwise the whole is tokenised at once, so that
    merges across the seam are the model's own.
    """
    messages = [{"role": "user", "content": _SLOT}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code that came with the model
        raise PopError(f"This model's chat template cannot be used ({error}); run it with a plain prompt.") from None
    before, found, after = rendered.partition(_SLOT)
    if not found:
        raise PopError("This model's chat template drops the user's text; run it with a plain prompt.")
    if any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.special):
        pieces = ((before, False), (text, True), (after, False))
    else:
        pieces = ((before + text + after, False),)
    ids = []
    for piece, split in pieces:
        ids += tokenizer(piece, add_special_tokens=False, split_special_tokens=split)["input_ids"]
    return _one_bos(tokenizer, ids)


def _plain_ids(tokenizer, text: str) -> list[int]:
    return _one_bos(tokenizer, tokenizer(text, split_special_tokens=True)["input_ids"])


def _one_bos(tokenizer, ids: list[int]) -> list[int]:
    """Templates and tokenizers may both add a BOS; a second one in front is dropped."""
    bos = tokenizer.bos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids
