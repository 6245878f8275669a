"""What the Compare page does, without its widgets: settings in, dictionaries of what to show out.

Generators yield `{name of an output: value}`; `compare.py` maps the names to components. They raise nothing: an error
becomes a sentence under "alert", and what was shown before stays.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gradio as gr

from pop_core.errors import Cancelled, PopError
from pop_core.forecast import default_plan
from pop_core.plan import FITTED, OWN, Plan
from pop_core.plots import timing_figure
from pop_core.sentences import difference_sentence, duration, timing_sentence

from . import answers
from .background import watch
from .controls import read_plan, read_prompt, whole_between
from .export import exports
from .links import CUT
from .picture_box import read_images
from .shared import watch_loading
from .turns import failure, names_of, safely, statuses

MAX_REPEATS = 20


@dataclass(frozen=True)
class Settings:
    """One comparison, checked as far as that goes without the model. `chat` None takes the chat template where the
    model has one; images: paths, in front of the prompt; image_tokens: as for `Engine.encode`."""

    model: str
    prompt: str
    plan: Plan
    sampling: object
    chat: bool | None
    repeats: int
    images: list[str]
    image_tokens: int | None


def read_settings(
    model, prompt, cutoff, kv, sinks, boundary, ratio, width, rescore,
    max_new_tokens, temperature, top_p, top_k, seed, stop, style, repeats, images=None, image_tokens=None,
) -> Settings:  # fmt: skip
    """Settings from raw values, a page's or anybody's. Raises `PopError` before any model is touched."""
    from pop_core.sampling import Sampling  # these two need torch
    from pop_core.vision import checked_most

    prompt = read_prompt(prompt)
    if style not in (None, "chat", "plain"):
        raise PopError(f"The prompt format is {style!r}; it must be 'chat' or 'plain'.")
    return Settings(
        model=model,
        prompt=prompt,
        plan=read_plan(cutoff, kv, sinks, boundary, ratio, width, rescore),
        sampling=Sampling(max_new_tokens, temperature, top_p, top_k, seed, tuple(str(stop or "").splitlines())),
        chat=False if style == "plain" else None,
        repeats=whole_between(repeats, "number of repeats", 1, MAX_REPEATS),
        images=read_images(images),
        image_tokens=checked_most(image_tokens or None),
    )


NAMES = names_of(read_settings)


def run(raw: dict, previous: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """A whole comparison for the page. previous: the comparison that is on screen."""
    updates = perform(raw, stop, session)
    return safely(updates, "panes", lambda: shown(previous), "Stopped before anything was written")


def perform(raw: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """The same, for whoever handles errors; the last item has the "result"."""
    settings = read_settings(**raw)
    engine = yield from statuses(watch_loading(settings.model, stop))
    yield model_shown(engine, settings.plan)
    engine.check(settings.plan, bool(settings.images))
    plan, notice = usable_plan(engine, settings.plan)
    yield {"fit_note": answers.note(notice), "fit": gr.update(visible=bool(notice))}
    looking = True  # what the pictures are is told once
    for progress, text in compare_progress(engine, replace(settings, plan=plan), stop):
        if progress.result:
            result = progress.result.to_dict()
            result["pruned"]["notices"] += [notice] if notice else []
            result |= {"most_image_tokens": settings.image_tokens} if settings.image_tokens else {}
            yield shown(result) | exports(result, session) | {"status": ending(result)}
        elif progress.dense:
            pictures = {"pictures": answers.pictures(progress.dense.pictures)} if looking else {}
            yield streamed(progress, text) | pictures
            looking = False
        else:
            yield {"status": answers.status(text)}


def compare_progress(engine, settings: Settings, stop: threading.Event):
    """Run a comparison, yielding (`Progress`, what it is doing)."""
    from pop_core.compare import compare_steps

    def work(post, checkpoint):
        rounds = -1  # the first measurement is of the agreement
        options = {"chat": settings.chat, "repeats": settings.repeats, "checkpoint": checkpoint}
        options |= {"images": settings.images, "image_tokens": settings.image_tokens}
        for progress in compare_steps(engine, settings.prompt, settings.plan, settings.sampling, **options):
            rounds += progress.phase == "measuring"
            post((progress, describe(progress, rounds, settings)))

    yield from watch(work, stop)


def describe(progress, rounds: int, settings: Settings) -> str:
    """A phase in words."""
    if progress.phase == "reading":
        return "Reading the prompt, first dense, then pruned"
    if progress.phase == "writing":
        return f"Writing, token {progress.dense.new_tokens} of at most {settings.sampling.max_new_tokens}"
    if progress.phase == "measuring":
        return f"Measuring the reading, {rounds} of {settings.repeats}" if rounds else "Measuring the agreement"
    return "Done"


def usable_plan(engine, plan: Plan) -> tuple[Plan, str]:
    """The plan, or the same with own projections and the sentence that says why."""
    own = replace(plan, prefill=replace(plan.prefill, kv=OWN))
    try:
        if not needs_fit(engine, plan):
            return plan, ""
        from pop_core import kv_fit

        seconds = kv_fit.estimate_seconds(engine)
    except PopError as error:
        return own, f"{error} This run uses own projections."
    return own, (
        "Fitted projections are not there yet for this model and cutoff, so own projections are used. "
        f"Fitting takes about {duration(seconds)}, once."
    )


def needs_fit(engine, plan: Plan) -> bool:
    """Whether a plan asks for fitted projections that are not on disk."""
    cut = plan.prefill
    if cut.kv != FITTED or cut.cutoff >= engine.spec.layers:
        return False
    from pop_core import kv_fit

    return not kv_fit.is_fitted(engine, cut.cutoff)


def fit(raw: dict, previous: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """Fit the projections that the settings need, with progress."""
    try:
        yield {"alert": "", "status": answers.status("Loading")}
        from pop_core import kv_fit

        plan = read_plan(*(raw[name] for name in CUT))  # channels need no fit
        engine = yield from statuses(watch_loading(raw["model"], stop))
        plan.check(engine.spec.layers)

        def work(post, checkpoint):
            kv_fit.ensure(engine, plan, lambda *progress: post(progress), checkpoint)

        yield from statuses(watch(work, stop))
        words = "Fitted. Runs of this model now use fitted projections; press Run"
        yield {"status": answers.status(words, "done"), "fit": gr.update(visible=False)}
    except Cancelled:
        yield {"status": answers.status("Fitting was stopped; nothing was saved", "stopped")}
    except Exception as error:
        yield failure(error)


def pick(raw: dict, previous: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """Load the model that was picked; a failure leaves everything as it was."""
    try:
        yield {"alert": "", "status": answers.status("Loading")}
        engine = yield from statuses(watch_loading(raw["model"], stop))
        yield model_shown(engine, None) | {"status": answers.status(f"{raw['model']} is ready; press Run", "done")}
    except Cancelled:
        yield {"status": answers.status("Loading was stopped", "stopped")}
    except Exception as error:
        yield failure(error)


def model_shown(engine, plan: Plan | None) -> dict:
    """The controls of a model: the cutoff's range, and its notices. plan: None sets the default cutoff."""
    layers = engine.spec.layers
    cutoff = plan.prefill.cutoff if plan else default_plan(layers).prefill.cutoff
    notices = " ".join(engine.loaded.notices)
    return {"cutoff": gr.update(maximum=layers, value=min(cutoff, layers)), "notices": answers.note(notices)}


def shown(result: dict) -> dict:
    """A finished comparison, or what there is of a stopped one."""
    return {
        "pictures": answers.pictures(result["dense"].get("pictures", [])),
        "panes": answers.panes(result["dense"], result["pruned"], finished=True),
        "difference": answers.note(difference_sentence(result)),
        "figure": timing_figure(result),
        "timing": answers.note(timing_sentence(result)),
        "tiles": answers.tiles(result),
        "facts": answers.facts(result),
        "result": result,
    }


def streamed(progress, text: str) -> dict:
    """The answers so far."""
    fraction = progress.fraction if progress.phase != "reading" else None
    return {
        "panes": answers.panes(progress.dense.to_dict(), progress.pruned.to_dict()),
        "status": answers.status(text, fraction=fraction),
        "difference": answers.note("The numbers below are of the run before, until this one is done."),
    }


def ending(result: dict) -> str:
    if result["complete"]:
        return answers.status(f"Done: your own run, measured just now on {result['machine']}", "done")
    return answers.status("Stopped: what was done until then is shown, the timing is not complete", "stopped")
