"""What the Importance page does, without its widgets: settings in, dictionaries of what to show out.

Generators yield `{name of an output: value}`; `importance.py` maps the names to components. They raise nothing: an
error becomes a sentence under "alert", and what was shown before stays.
"""

import html
import threading
from collections.abc import Iterator

import gradio as gr

from pop_core import (
    findings,
    importance,
    importance_plots,
    importance_table,
    picture_findings,
    picture_plots,
    picture_view,
    scene_plots,
    token_findings,
    token_plots,
)
from pop_core.sentences import count, duration

from . import answers
from .analysis_settings import Settings, read_settings, read_tolerance, samples_of
from .background import watch
from .controls import whole_between
from .export import file, json_file
from .links import to_query
from .shared import SCENES, watch_loading
from .turns import safely, statuses

PHASES = {
    "gates": "Gates, forward and backward",
    "cutoffs": "Measuring what the cutoffs cost",
    "ablation": "Leaving out each layer",
}


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

    def work(post, checkpoint):
        steps = analyse_steps(
            engine,
            samples_of(engine, settings, checkpoint),
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
        "tokens": token_plots.tokens_figure(result),
        "tokens_note": answers.note(f"{token_findings.tokens_sentence(result)} {_scroll(result)}"),
        **over_pictures(result),
        **answers_about_scenes(result),
        "table": dict(zip(("headers", "data"), importance_table.display_rows(result), strict=True)),
        "facts": answers.fact_list(findings.facts(result), result["notices"]),
        "result": result,
    }


def chosen(result: dict, tolerance) -> dict:
    """What the tolerance changes: the cutoff, and everything that shows it."""
    share = read_tolerance(tolerance)
    cutoff = importance.recommended(result, share)
    speedup = importance.speedup_at(result["predicted"], cutoff)
    words = findings.curve_sentence(result, cutoff, share, speedup, result["predicted_tokens"])
    kinds = picture_findings.kinds_sentence(result, share)
    about = [findings.layers_sentence(result, cutoff), kinds, findings.uncertain(result)]
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


def _scroll(result: dict) -> str:
    drawn, every = token_plots.MOST_TOKENS, len(result["token_map"]["pieces"])
    which = f"the last {drawn} of its {every:,} tokens" if every > drawn else "all its tokens"
    return f"Scroll the map sideways for {which}."


def over_pictures(result: dict) -> dict:
    """The pictures of the first sample, and the map over them in the layer where they matter most; nothing for text."""
    if not picture_view.has_pictures(result):
        return {
            "over": gr.update(visible=False),
            "pictures": "",
            "layer": gr.skip(),
            "overlay": None,
            "overlay_note": "",
        }
    layer = picture_view.heaviest_layer(result)
    return {
        "over": gr.update(visible=True),
        "pictures": answers.pictures(result["pictures"]),
        "layer": gr.update(value=layer, maximum=len(result["layers"]) - 1),
        **in_layer(result, layer),
    }


def answers_about_scenes(result: dict) -> dict:
    """What was recorded of a model's answers about generated pictures, if anything was."""
    recorded = SCENES.get(result["model"])
    return {
        "scenes_box": gr.update(visible=recorded is not None),
        "scenes": recorded and scene_plots.answers_figure(recorded),
        "scenes_note": answers.note(scene_plots.answers_sentence(recorded) if recorded else ""),
    }


def in_layer(result: dict, layer) -> dict:
    """The map over the pictures in one layer. Raises `PopError`."""
    layer = whole_between(layer, "layer", 0, len(result["layers"]) - 1)
    said = [picture_findings.overlay_sentence(result, layer)]
    if len(result["pictures"]) > picture_plots.MOST_SHOWN:
        said.append(f"The first {picture_plots.MOST_SHOWN} of {len(result['pictures'])} pictures are shown.")
    return {"overlay": picture_plots.overlay_figure(result, layer), "overlay_note": answers.note(" ".join(said))}


def data_files(result: dict, session: str) -> dict:
    """The downloads "json" and "csv"."""
    return {
        "json": json_file("pop-studio-importance.json", result, session),
        "csv": file("pop-studio-importance.csv", importance_table.csv_bytes(result), session),
    }


def report_file(result: dict, tolerance, session: str) -> str:
    """The path of the figures and their sentences as one HTML page that needs no network."""
    share = read_tolerance(tolerance)
    cutoff = importance.recommended(result, share)
    speedup = importance.speedup_at(result["predicted"], cutoff)
    page = importance_table.report_html(result, cutoff, share, speedup, result["predicted_tokens"])
    return file("pop-studio-importance.html", page.encode(), session)


def choice(result: dict, cutoff: int | None) -> str:
    """The way to the Compare page with this cutoff, as a link that looks like a button."""
    if cutoff is None:
        return answers.note("No cutoff can be recommended from this result.", "problem")
    query = html.escape(to_query(result["model"], {"cutoff": cutoff}))
    return f'<a class="go" id="use" href="./{query}">Compare with cutoff {cutoff}</a>'
