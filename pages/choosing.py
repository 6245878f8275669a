"""What the Channels page does, without its widgets: settings in, dictionaries of what to show out.

Generators yield `{name of an output: value}`; `channels.py` maps the names to components. They raise nothing: an error
becomes a sentence under "alert", and what was shown before stays.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gradio as gr

from pop_core import (
    channel_findings,
    channel_plots,
    channel_table,
    expert_plots,
    method_findings,
    method_plots,
    recorded,
)
from pop_core.channel_view import layers, mixtures, single
from pop_core.errors import PopError
from pop_core.forecast import forecast
from pop_core.plan import SUM, ChannelPruning, Plan, whole_number

from . import answers
from .background import watch
from .choosing_html import link_here, link_to_compare, method_list, pieces
from .controls import read_channels, read_prompt, whole_between
from .export import file, json_file
from .picture_box import read_images
from .shared import spec_of, watch_loading
from .turns import names_of, safely, statuses

MOST_TOKENS = 256  # of an answer
RECORDED = {
    path.stem.removeprefix("channels-"): recorded.load(path)
    for path in sorted(recorded.RECORDED.glob("channels-*.json"))
}


@dataclass(frozen=True)
class Settings:
    """One study, checked as far as that goes without the model."""

    model: str
    prompt: str
    plan: Plan
    peers: bool
    max_new_tokens: int
    images: list[str]


def read_settings(model, prompt, ratio, width, rescore, score, max_new_tokens, peers, layer, images=None) -> Settings:
    """Settings from raw values. Raises `PopError` before any model is touched. layer: only of what is shown."""
    return Settings(
        model=model,
        prompt=read_prompt(prompt),
        plan=Plan(channels=read_pruning(ratio, width, rescore, score)),
        peers=bool(peers),
        max_new_tokens=whole_between(max_new_tokens, "answer length", 1, MOST_TOKENS),
        images=read_images(images),
    )


NAMES = names_of(read_settings)


def read_pruning(ratio, width, rescore, score=SUM) -> ChannelPruning:
    """Channel pruning of raw values. Raises `PopError`, also where nothing would be pruned."""
    channels = read_channels(ratio, width, rescore)
    if channels is None:
        raise PopError("At a prune ratio of 0 nothing is pruned, so there is nothing to study; choose a higher one.")
    return replace(channels, score=score)


def run(raw: dict, previous: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """A whole study for the page. previous: the result that is on screen."""
    nothing = "Stopped before anything was written; nothing was changed"
    return safely(perform(raw, stop, session), "panes", lambda: shown(previous, raw["layer"]), nothing)


def perform(raw: dict, stop: threading.Event, session: str) -> Iterator[dict]:
    """The same, for whoever handles errors; the last item has the "result"."""
    settings = read_settings(**raw)
    engine = yield from statuses(watch_loading(settings.model, stop))
    yield {"notices": answers.note(" ".join(engine.loaded.notices))}
    for progress in study_progress(engine, settings, stop):
        if progress.result:
            result = progress.result.to_dict()
            kind = "done" if result["complete"] else "stopped"
            line = {"status": answers.status(channel_findings.ending(result), kind)}
            yield shown(result, raw["layer"]) | data_files(result, session) | line
        else:
            yield so_far(progress, settings)


def study_progress(engine, settings: Settings, stop: threading.Event):
    """Run a study, yielding its `Progress`."""
    from pop_core.channel_study import study_steps
    from pop_core.sampling import Sampling

    def work(post, checkpoint):
        sampling = Sampling(max_new_tokens=settings.max_new_tokens)
        options = {"peers": settings.peers, "checkpoint": checkpoint, "images": settings.images}
        steps = study_steps(engine, settings.prompt, settings.plan, sampling, **options)
        for progress in steps:
            post(progress)

    yield from watch(work, stop)


def so_far(progress, settings: Settings) -> dict:
    """The status line and, while it is written, the pruned answer."""
    fraction = progress.fraction
    update = {"status": answers.status(doing(progress, settings), fraction=fraction)}
    if progress.run and progress.run.tokens:
        update["pictures"] = answers.pictures(progress.run.pictures)
        update["panes"] = answers.panes(None, progress.run.to_dict())
        update["answers_note"] = answers.note("The figures below are of the study before, until this one is done.")
    return update


def doing(progress, settings: Settings) -> str:
    """A phase in words."""
    if progress.phase == "calibrating":
        return "Reading calibration text, once for each model" if settings.peers else "Getting ready"
    if progress.phase == "writing":
        name = "pruned" if progress.fraction < 0.5 else "dense"  # one after the other, half of the way each
        token = round(progress.fraction % 0.5 * 2 * settings.max_new_tokens)
        return f"Writing the {name} answer, token {token} of at most {settings.max_new_tokens}"
    if progress.phase == "measuring":
        return f"Following the dense answer: {progress.method}"
    return "Timing all methods, a few steps of each in turn"


def shown(result: dict, layer) -> dict:
    """A result, in all its figures and words. layer: whose candidates to show, if it has it."""
    count, at = len(layers(result)), usable_layer(result, layer)
    begun = result["dense"]["tokens"] or result["dense"]["stop"] != "cancelled"
    return chosen(result, at) | {
        "caption": answers.note(channel_findings.caption(result)),
        "pictures": answers.pictures(result["pruned"].get("pictures", [])),
        "panes": answers.panes(result["dense"] if begun else None, result["pruned"], finished=True),
        "answers_note": answers.note(channel_findings.answers_sentence(result)),
        "pieces": pieces(result),
        "single": gr.update(visible=bool(single(result)) or not mixtures(result)),
        **figure("regions", channel_plots.regions_figure(result), channel_findings.map_sentence(result)),
        "layer": gr.update(maximum=max(1, count - 1), value=at),
        **figure("overlap", channel_plots.overlap_figure(result), channel_findings.overlap_sentence(result)),
        **figure("quality", method_plots.quality_figure(result), method_findings.quality_sentence(result)),
        **figure("speed", method_plots.speed_figure(result), method_findings.speed_sentence(result, limit(result))),
        "methods": method_list(result),
        "mixture": gr.update(visible=bool(mixtures(result))),
        **figure("experts", expert_plots.experts_figure(result), channel_findings.experts_sentence(result)),
        "method_table": channel_table.display(channel_table.method_rows(result), channel_table.METHOD_NAMES),
        "layer_table": channel_table.display(channel_table.layer_rows(result), channel_table.LAYER_NAMES),
        "facts": answers.fact_list(channel_findings.facts(result), result["notices"]),
        "link": link_here(result),
        "compare": link_to_compare(result),
        "result": result,
    }


def chosen(result: dict, layer) -> dict:
    """What the layer changes. Raises `PopError` for one that is not there."""
    at, last = whole_number(layer, "layer"), max(0, len(layers(result)) - 1)
    if not 0 <= at <= last:
        raise PopError(f"The layer is {at}; this model has the layers 0 to {last}.")
    return figure("choices", channel_plots.choices_figure(result, at), channel_findings.chosen_sentence(result, at))


def figure(name: str, drawn, sentence: str) -> dict:
    """A figure and the sentence under it, unless the figure is a sentence itself."""
    return {name: drawn, f"{name}_note": answers.note(sentence if drawn.data else "")}


def usable_layer(result: dict, layer) -> int:
    """The layer that was asked for, or the middle one where there is no such layer."""
    count = len(layers(result))
    try:
        at = whole_number(layer, "layer")
    except PopError:
        at = -1
    return at if 0 <= at < max(1, count) else count // 2


def limit(result: dict) -> float | None:
    """The speed-up of writing that the weights which are read allow; None for a model whose shape nobody knows."""
    spec = shape_of(result["model"])
    if spec is None:
        return None
    tokens = result["pruned"]["prompt_tokens"]
    return forecast(Plan.from_dict(result["plan"]), spec.layers, tokens, spec).channels.speedup


def shape_of(model):
    """The shape of a model in memory, of an embedded or of a recorded one; None for one that nobody has loaded yet."""
    return spec_of(model) or (RECORDED[model][1] if model in tuple(RECORDED) else None)


def data_files(result: dict, session: str) -> dict:
    """The downloads."""
    methods = channel_table.method_rows(result), channel_table.METHOD_NAMES
    by_layer = channel_table.layer_rows(result), channel_table.LAYER_NAMES
    return {
        "json": json_file("pop-studio-channels.json", result, session),
        "methods_csv": file("pop-studio-methods.csv", channel_table.csv_bytes(result, *methods), session),
        "layers_csv": file("pop-studio-channels.csv", channel_table.csv_bytes(result, *by_layer), session),
    }
