"""What the Importance page does, without its widgets: settings in, dictionaries of what to show out.

Generators yield `{name of an output: value}`; `importance.py` maps the names to components. They raise nothing: an
error becomes a sentence under "alert", and what was shown before stays.
"""

import html
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from pop_core import calibration, findings, importance, importance_plots, importance_table
from pop_core.costs import ablation_bytes, analysis_bytes
from pop_core.errors import PopError
from pop_core.sentences import count, duration, gigabytes

from . import answers
from .background import watch
from .controls import whole_between
from .export import file, json_file
from .links import to_query
from .shared import MAX_CHARACTERS, watch_loading
from .turns import names_of, safely, statuses

OWN_TEXT, FILE, ALL_KINDS = "own", "file", "all"
TEXTS = {ALL_KINDS: "Calibration text, all kinds"} | {kind: f"Calibration text, {kind}" for kind in calibration.KINDS}
CHOICES = TEXTS | {OWN_TEXT: "My own text", FILE: "A text file"}
MOST_SAMPLES = 500
PHASES = {
    "gates": "Gates, forward and backward",
    "cutoffs": "Measuring what the cutoffs cost",
    "ablation": "Leaving out each layer",
}


@dataclass(frozen=True)
class Settings:
    """One analysis, checked as far as that goes without the model."""

    model: str
    text: str
    title: str
    samples: int
    prompt_tokens: int
    new_tokens: int
    ablated: int
    seed: int
    tolerance: float


def read_settings(model, source, own, file, samples, prompt_tokens, new_tokens, ablated, seed, tolerance) -> Settings:
    """Settings from raw values. Raises `PopError` before any model is touched."""
    samples = whole_between(samples, "number of samples", 1, MOST_SAMPLES)
    prompt_tokens = whole_between(prompt_tokens, "number of prompt tokens", 2, importance.MOST_TOKENS)
    new_tokens = whole_between(new_tokens, "number of new tokens", 1, importance.MOST_TOKENS)
    if prompt_tokens + new_tokens > importance.MOST_TOKENS:
        raise PopError(
            f"A sample would have {prompt_tokens + new_tokens:,} tokens; the analysis takes at most "
            f"{importance.MOST_TOKENS:,}."
        )
    return Settings(
        model=model,
        text=read_text(source, own, file),
        title=Path(file).name if source == FILE else CHOICES[source],
        samples=samples,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        ablated=whole_between(ablated, "number of ablated samples", 0, samples),
        seed=whole_between(seed, "seed", 0, 2**32),
        tolerance=read_tolerance(tolerance),
    )


NAMES = names_of(read_settings)


def read_text(source, own, file) -> str:
    """The text that the samples are cut from. Raises `PopError`."""
    if source not in tuple(CHOICES):
        raise PopError(f"The text is {str(source)[:40]!r}; it must be one of {', '.join(CHOICES)}.")
    if source == FILE:
        if not file:
            raise PopError("No file was chosen; upload a text file, or choose another text.")
        try:
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


def run(raw: dict, previous: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """A whole analysis for the page. previous: the result that is on screen."""
    nothing = "Stopped before the first sample was done; nothing was changed"
    return safely(perform(raw, stop, session), "layers", lambda: shown(previous, raw["tolerance"]), nothing)


def perform(raw: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """The same, for whoever handles errors; the last item has the "result"."""
    settings = read_settings(**raw)
    engine = yield from statuses(watch_loading(settings.model, stop))
    yield {"notices": answers.note(" ".join(engine.loaded.notices))}
    drawn = None
    for progress, snapshot in analysis_progress(engine, settings, stop):
        if progress.phase == "done":
            result = snapshot.to_dict()
            yield (
                shown(result, raw["tolerance"])
                | data_files(result, session)
                | {"status": answers.status(findings.ending(result), "done" if result["complete"] else "stopped")}
            )
        else:
            yield so_far(progress, snapshot if snapshot is not drawn else None)
            drawn = snapshot


def analysis_progress(engine, settings: Settings, stop: threading.Event):
    """Run an analysis, yielding (`Progress`, the result so far whenever the number of samples has doubled)."""
    from pop_core.analysis import analyse_steps
    from pop_core.quality import text_segments

    def work(post, checkpoint):
        lengths = settings.prompt_tokens, settings.new_tokens
        samples = text_segments(engine, settings.text, *lengths, settings.samples, spread=True)
        steps = analyse_steps(
            engine,
            samples,
            settings.prompt_tokens,
            seed=settings.seed,
            ablation=settings.ablated,
            tolerance=settings.tolerance,
            text=settings.title,
            checkpoint=checkpoint,
        )
        snapshot = None
        for progress in steps:
            doubled = progress.phase == "gates" and progress.done and not progress.done & (progress.done - 1)
            if doubled or progress.phase == "done":
                snapshot = progress.snapshot()
            post((progress, snapshot))

    yield from watch(work, stop)


def so_far(progress, snapshot) -> dict:
    """The status line and, with a new snapshot, the heatmap as it sharpens."""
    left = "" if progress.seconds_left is None else f", about {duration(progress.seconds_left)} left"
    text = f"{PHASES[progress.phase]}: {progress.done} of {count(progress.total, 'sample')}{left}"
    update = {"status": answers.status(text, fraction=progress.done / progress.total)}
    if snapshot:
        result = snapshot.to_dict()
        sentence = "This sharpens with every sample. The figures below are of the result before."
        update |= {"preview": "", "caption": answers.note(findings.caption(result))}
        update["layers"] = importance_plots.layers_figure(result, result["recommended_cutoff"])
        update["layers_note"] = answers.note(sentence)
    return update


def shown(result: dict, tolerance) -> dict:
    """A result, in all its figures and words."""
    return chosen(result, tolerance) | {
        "ablation": importance_plots.ablation_figure(result),
        "ablation_note": answers.note(findings.ablation_sentence(result)),
        "tokens": importance_plots.tokens_figure(result),
        "tokens_note": answers.note(f"{findings.tokens_sentence(result)} Scroll the map sideways for all its tokens."),
        "table": dict(zip(("headers", "data"), importance_table.display_rows(result), strict=True)),
        "facts": answers.fact_list(findings.facts(result), result["notices"]),
        "result": result,
    }


def chosen(result: dict, tolerance) -> dict:
    """What the tolerance changes: the cutoff, and everything that shows it."""
    share = read_tolerance(tolerance)
    cutoff = importance.recommend(result["layers"], share)
    speedup = importance.speedup_at(result["predicted"], cutoff)
    words = findings.curve_sentence(result, cutoff, share, speedup, result["predicted_tokens"])
    about = [findings.layers_sentence(result, cutoff), findings.uncertain(result)]
    return {
        "preview": "",
        "caption": answers.note(findings.caption(result)),
        "layers": importance_plots.layers_figure(result, cutoff),
        "layers_note": answers.note(" ".join(filter(None, about))),
        "curve": importance_plots.curve_figure(result, share, cutoff),
        "curve_note": answers.note(words),
        "choice": choice(result, cutoff),
        "report": gr.update(visible=False),  # it was made of what was shown before
    }


def looked_ahead(spec, itemsize: int, settings: Settings) -> str:
    """What an analysis will need, in a sentence. Raises `PopError` where the model's context is shorter."""
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


def data_files(result: dict, session: str) -> dict:
    """The downloads "json" and "csv"."""
    return {
        "json": json_file("pop-studio-importance.json", result, session),
        "csv": file("pop-studio-importance.csv", importance_table.csv_bytes(result), session),
    }


def report_file(result: dict, tolerance, session: str) -> str:
    """The path of the figures and their sentences as one HTML page that needs no network."""
    share = read_tolerance(tolerance)
    cutoff = importance.recommend(result["layers"], share)
    speedup = importance.speedup_at(result["predicted"], cutoff)
    page = importance_table.report_html(result, cutoff, share, speedup, result["predicted_tokens"])
    return file("pop-studio-importance.html", page.encode(), session)


def choice(result: dict, cutoff: int | None) -> str:
    """The way to the Compare page with this cutoff, as a link that looks like a button."""
    if cutoff is None:
        return answers.note("No cutoff can be recommended from this result.", "problem")
    query = html.escape(to_query(result["model"], {"cutoff": cutoff}))
    return f'<a class="go" id="use" href="./{query}">Compare with cutoff {cutoff}</a>'
