"""What the Importance page may be asked: which prompts to read, how many, how long; checked and made into samples."""

from dataclasses import dataclass
from pathlib import Path

from pop_core import calibration, importance
from pop_core.costs import ablation_bytes, analysis_bytes
from pop_core.errors import PopError
from pop_core.sentences import count, gigabytes

from .controls import read_prompt, whole_between
from .picture_box import read_images
from .shared import MAX_CHARACTERS
from .turns import names_of

OWN_TEXT, FILE, ALL_KINDS, SCENES, PICTURE = "own", "file", "all", "scenes", "picture"
TEXTS = {ALL_KINDS: "Calibration text, all kinds"} | {kind: f"Calibration text, {kind}" for kind in calibration.KINDS}
PICTURES = {SCENES: "Generated pictures with questions", PICTURE: "My own picture"}  # for models with eyes
CHOICES = TEXTS | {OWN_TEXT: "My own text", FILE: "A text file"} | PICTURES
MOST_SAMPLES = 500
MOST_BYTES = 1_000_000  # of a text file
MOST_OF_QUESTION = 80  # characters in the name of an analysis


@dataclass(frozen=True)
class Settings:
    """One analysis, checked as far as that goes without the model. text: to cut samples from, or the question about
    the pictures, whose paths are `images`. prompt_tokens: of a text; None with pictures, where the prompt decides."""

    model: str
    source: str
    text: str
    images: tuple[str, ...]
    title: str
    samples: int
    prompt_tokens: int | None
    new_tokens: int
    ablated: int
    seed: int
    tolerance: float


def read_settings(
    model, source, own, file, images, question, samples, prompt_tokens, new_tokens, ablated, seed, tolerance
) -> Settings:
    """Settings from raw values. Raises `PopError` before any model is touched."""
    samples = whole_between(samples, "number of samples", 1, MOST_SAMPLES)
    new_tokens = whole_between(new_tokens, "number of new tokens", 1, importance.MOST_TOKENS)
    prompt_tokens = None if source in PICTURES else _prompt_tokens(prompt_tokens, new_tokens)
    text, paths = read_text(source, own, file, question), ()
    title = Path(file).name if source == FILE else CHOICES[source]
    if source == PICTURE:
        paths, title = tuple(read_images(images)), f"{title}: {text[:MOST_OF_QUESTION]}"
        if not paths:
            raise PopError("There is no picture; upload one, or choose another text.")
    return Settings(
        model=model,
        source=source,
        text=text,
        images=paths,
        title=title,
        samples=samples,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        ablated=whole_between(ablated, "number of ablated samples", 0, samples),
        seed=whole_between(seed, "seed", 0, 2**32),
        tolerance=read_tolerance(tolerance),
    )


def _prompt_tokens(value, new_tokens: int) -> int:
    prompt_tokens = whole_between(value, "number of prompt tokens", 2, importance.MOST_TOKENS)
    if prompt_tokens + new_tokens > importance.MOST_TOKENS:
        raise PopError(
            f"A sample would have {prompt_tokens + new_tokens:,} tokens; the analysis takes at most "
            f"{importance.MOST_TOKENS:,}."
        )
    return prompt_tokens


NAMES = names_of(read_settings)


def read_text(source, own, file, question="") -> str:
    """The text that the samples are cut from, or the question about pictures. Raises `PopError`."""
    if source not in tuple(CHOICES):
        raise PopError(f"The text is {str(source)[:40]!r}; it must be one of {', '.join(CHOICES)}.")
    if source in PICTURES:
        return read_prompt(question) if source == PICTURE else ""
    if source == FILE:
        if not file:
            raise PopError("No file was chosen; upload a text file, or choose another text.")
        try:
            if Path(file).stat().st_size > MOST_BYTES:
                raise PopError("The file is larger than 1 MB; upload a shorter text.")
            own = Path(file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            raise PopError("The file is not UTF-8 text; upload a plain text file.") from None
    elif source != OWN_TEXT:
        return calibration.read_all() if source == ALL_KINDS else calibration.read_kind(source)
    own = own if isinstance(own, str) else ""
    if not own.strip():
        raise PopError("The text is empty; type or upload some, or choose a calibration text.")
    if len(own) > MAX_CHARACTERS:
        raise PopError(f"The text has {len(own):,} characters; this page takes at most {MAX_CHARACTERS:,}.")
    return own


def read_tolerance(percent) -> float:
    """The page's tolerance, in percent, as a share. Raises `PopError`."""
    try:
        return importance.checked_tolerance(float(percent) / 100)
    except (TypeError, ValueError):
        what = "empty" if percent is None else repr(str(percent)[:40])
        raise PopError(f"The tolerance is {what}; it must be a number from 0 to 100 percent.") from None


def samples_of(engine, settings: Settings, checkpoint) -> list:
    """What an analysis reads. A single prompt is taken as often as samples are wanted, with other labels each time."""
    from pop_core.samples import image_samples, text_samples

    count, new_tokens = settings.samples, settings.new_tokens
    if settings.source == SCENES:
        return image_samples(engine, calibration.scene_prompts(count), new_tokens, checkpoint)
    if settings.source == PICTURE:
        return image_samples(engine, [(settings.images, settings.text, None)], new_tokens, checkpoint) * count
    return text_samples(engine, settings.text, settings.prompt_tokens, new_tokens, count)


def looked_ahead(spec, itemsize: int, settings: Settings) -> str:
    """What an analysis will need, in a sentence. Raises `PopError` where the model's context is shorter."""
    if settings.source in PICTURES:
        return f"{count(settings.samples, 'sample')}; how long one is depends on its picture and on its answer."
    tokens, labels = settings.prompt_tokens + settings.new_tokens, settings.new_tokens
    if tokens > spec.max_positions:
        room = spec.max_positions
        raise PopError(f"A sample would have {tokens:,} tokens; at most {room:,} fit this model's context.")
    need = analysis_bytes(spec, tokens - 1, labels, itemsize, recompute=False)
    if settings.ablated:
        need = max(need, ablation_bytes(spec, tokens - 1, labels))
    total = f"{count(settings.samples, 'sample')} of {tokens:,} tokens"
    return (
        f"{total}; about {gigabytes(need)} of memory beside the model, or less, but slower, if layers are recomputed."
    )
