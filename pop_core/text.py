"""From what a person typed to token ids: cleaning, chat template, exactly one BOS, lengths."""

import threading
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PopError

MAX_CHARACTERS = 1_000_000  # tokenising more than this would keep the machine busy before any limit is checked
_SLOT = "\u2063pop-studio-user-text\u2063"  # where the user's text goes while the template is rendered
_tokenizer_lock = threading.Lock()  # `split_special_tokens` is a switch on the shared tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run: the cleaned text, its token ids, whether the chat template was used, and notices.

    ms: how long cleaning, tokenising and scaling of pictures took. pixels: the pictures in front of the text as
    `vision.Pixels`, or None.
    """

    text: str
    ids: tuple[int, ...]
    chat: bool
    notices: tuple[str, ...]
    ms: float
    pixels: object = None

    @property
    def image_tokens(self) -> int:
        return self.pixels.tokens if self.pixels else 0


def encode_prompt(
    tokenizer,
    text: str,
    chat: bool | None = None,
    eyes=None,
    images: Sequence = (),
    image_tokens: int | None = None,
) -> Prompt:
    """Tokenise a user's text, with `images` in front of it. chat: None takes the chat template where the model has one.
    eyes: the model's `vision.Eyes`, wanted where there are images. image_tokens: as for `Eyes.prepare`.

    Special-token text typed by the user is text, never a control token. Raises `PopError` for empty prompts, for a
    prompt over `MAX_CHARACTERS`, for `chat=True` on a model without a template, and for pictures that cannot be used.
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
    pixels = eyes.prepare(images, image_tokens) if images else None
    bos = bos_ids(tokenizer) if images and not chat else []
    with _tokenizer_lock:
        before, after = _in_chat(tokenizer, len(images)) if chat else (None, "")
        if pixels:
            before = _in_full(before, eyes, pixels) if chat else _alone(eyes, pixels)
        ids = _one_bos(tokenizer, bos + _ids_between(tokenizer, text, before, after))
    if not ids:
        raise PopError("The prompt has no tokens; type some text.")
    notices += pixels.notices if pixels else ()
    return Prompt(text, tuple(ids), chat, notices, (time.perf_counter() - start) * 1e3, pixels)


def encode_text(tokenizer, text: str) -> list[int]:
    """A document's ids without BOS or template, special-token text as text (for calibration and quality)."""
    with _tokenizer_lock:
        return tokenizer(clean(text)[0], add_special_tokens=False, split_special_tokens=True)["input_ids"]


def picture_ids(tokenizer, eyes, pixels) -> list[int]:
    """The ids of pictures in front of a prompt without a template, BOS not included."""
    with _tokenizer_lock:
        return tokenizer(_alone(eyes, pixels), add_special_tokens=False)["input_ids"]


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


def _in_chat(tokenizer, images: int) -> tuple[str, str]:
    """What the chat template puts before and after the text of one user turn that begins with pictures."""
    parts = [{"type": "image"}] * images + [{"type": "text", "text": _SLOT}]
    messages = [{"role": "user", "content": parts if images else _SLOT}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code that came with the model
        raise PopError(f"This model's chat template cannot be used ({error}); run it with a plain prompt.") from None
    before, found, after = rendered.partition(_SLOT)
    if not found or _SLOT in after:
        what = "repeats" if found else "drops"
        raise PopError(f"This model's chat template {what} the user's text; run it with a plain prompt.")
    return before, after


def _alone(eyes, pixels) -> str:
    """The text of pictures that no template puts into its place."""
    return _in_full(eyes.alone() * len(pixels.facts), eyes, pixels)


def _in_full(before: str, eyes, pixels) -> str:
    """The text in front of the user's with every placeholder at its picture's length. Raises `PopError`."""
    pieces = before.split(eyes.placeholder)
    if len(pieces) != len(pixels.facts) + 1:
        raise PopError("This model's chat template has no place for pictures; run it with a plain prompt.")
    filled = [eyes.in_full(fact["tokens"]) + piece for fact, piece in zip(pixels.facts, pieces[1:], strict=True)]
    return pieces[0] + "".join(filled)


def _ids_between(tokenizer, text: str, before: str | None, after: str) -> list[int]:
    """Ids of the text between what the template, or a picture, puts around it; before: None for nothing at all.

    The user's text is split off only when it spells special tokens: otherwise the whole is tokenised at once, so that
    merges across the seam are the model's own.
    """
    if before is None:
        return tokenizer(text, split_special_tokens=True)["input_ids"]
    if any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.special):
        pieces = ((before, False), (text, True), (after, False))
    else:
        pieces = ((before + text + after, False),)
    ids = []
    for piece, split in pieces:
        ids += tokenizer(piece, add_special_tokens=False, split_special_tokens=split)["input_ids"]
    return ids


def _one_bos(tokenizer, ids: list[int]) -> list[int]:
    """Templates and tokenizers may both add a BOS; a second one in front is dropped."""
    bos = tokenizer.bos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids
