"""Compare: one prompt answered twice, dense and pruned: deep layers skipped while reading, FFN channels left out while
writing, or both; the first page."""

import uuid
from dataclasses import replace

import gradio as gr

from pop_core import recorded
from pop_core.errors import PopError
from pop_core.families import MOST_LAYERS
from pop_core.forecast import default_plan, forecast
from pop_core.plan import ChannelPruning
from pop_core.sentences import date

from . import answers, api, comparing
from .comparing import NAMES
from .controls import (
    MOST_RATIO,
    channel_details,
    cutoff_slider,
    foresee,
    foreseen,
    model_picker,
    plan_details,
    ratio_slider,
    read_plan,
    run_buttons,
    two_columns,
)
from .examples import example_for, load_examples, pictures, titles
from .export import exports
from .links import CHANNELS, CUT, KEYS, OFF, read_query
from .picture_box import connect_pictures, picture_box, picture_update, pictures_seen
from .shared import DEFAULT_MODEL, MAX_CHARACTERS, MODEL_QUEUE, spec_of
from .turns import AT_ONCE, ModelEvents

PLAN = (*CUT, *CHANNELS)
OUTPUTS = (
    *("alert", "status", "pictures", "panes", "difference", "tiles", "figure", "timing", "facts"),
    *("download", "code", "link", "result", "cutoff", "notices", "fit", "fit_note"),
)
RECORDED, SPEC, COMMAND = recorded.load(recorded.RECORDED / f"compare-{DEFAULT_MODEL}.json")
EXAMPLES = load_examples()
DEFAULT = default_plan(SPEC.layers)
INTRO = """<header class="intro"><p class="brand">POP Studio</p>
<h1>Read with fewer layers, write with all of them</h1>
<p>A language model needs its deep layers to write an answer, but hardly to read your prompt. Skip them while reading,
leave out FFN channels while writing, and see beside the full model what that saves and what it costs.</p></header>"""


def form() -> dict:
    """The left column: the controls, by the name of their setting, and the HTML beside them."""
    c = {"model": model_picker(), "notices": gr.HTML(elem_classes="plain")}
    c["example"] = gr.Dropdown(
        [(title, at) for at, title in enumerate(titles(EXAMPLES))], value=0, label="Example", elem_id="example"
    )
    c["asked"] = gr.State("")  # changes when an example asks for its model
    c |= picture_box()
    c["prompt"] = gr.Textbox(
        EXAMPLES[0]["prompt"], label="Prompt", lines=6, max_lines=8, max_length=MAX_CHARACTERS, elem_id="prompt"
    )
    c["cutoff"] = cutoff_slider(SPEC.layers)
    c["ratio"] = ratio_slider(OFF["ratio"])
    c["forecast"] = gr.HTML(first_forecast(), elem_classes="plain", elem_id="forecast")
    with gr.Column(visible=False, elem_classes="fit") as c["fit"]:
        c["fit_note"] = gr.HTML(elem_classes="plain")
        c["fit_button"] = gr.Button("Fit now", size="sm", elem_id="fit")
    c |= run_buttons()
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        c.update(zip(CUT, plan_details(c["cutoff"], DEFAULT.prefill), strict=True))
        c.update(zip(CHANNELS, channel_details(c["ratio"]), strict=True))
        c.update(sampling_details())
    return c


def sampling_details() -> dict:
    """How the answer is written, and how often its reading is timed."""
    c = {}
    rows = (
        (
            ("max_new_tokens", EXAMPLES[0]["max_new_tokens"], "Answer length", "tokens at most"),
            ("repeats", 3, "Repeats", "of the timed reading"),
        ),
        (("temperature", 0, "Temperature", "0: the best token"), ("seed", 0, "Seed", "of the random choice")),
        (("top_p", 1, "Top p", "1: off"), ("top_k", 0, "Top k", "0: off")),
    )
    for row in rows:
        with gr.Row():
            for name, value, label, info in row:
                c[name] = gr.Number(value, label=label, info=info, min_width=100, elem_id=name)
    c["image_tokens"] = gr.Number(
        0,
        label="Image tokens",
        info="that each picture is scaled to. 0: as the model has it",
        elem_id="image_tokens",
    )
    c["stop"] = gr.Textbox(
        label="Stop strings, one a line", lines=1, max_lines=4, max_length=2000, elem_id="stop_strings"
    )
    c["style"] = gr.Radio(
        [("Chat template, if the model has one", "chat"), ("Plain prompt", "plain")],
        value="chat",
        label="Prompt format",
        elem_id="style",
    )
    return c


def results() -> dict:
    """The right column, filled with the recorded comparison."""
    show = comparing.shown(RECORDED) | exports(RECORDED, "recorded")
    r = {"alert": gr.HTML(elem_classes="plain", elem_id="alert")}
    r["status"] = gr.HTML(recorded_status(), elem_classes="plain", elem_id="status")
    r["pictures"] = gr.HTML(show["pictures"], elem_classes="plain", elem_id="pictures")
    r["panes"] = gr.HTML(show["panes"], elem_classes="plain", elem_id="panes")
    r["difference"] = gr.HTML(show["difference"], elem_classes="plain")
    r["tiles"] = gr.HTML(show["tiles"], elem_classes="plain", elem_id="tiles")
    r["figure"] = gr.Plot(show["figure"], show_label=False, container=False, elem_id="figure")
    r["timing"] = gr.HTML(show["timing"], elem_classes="plain", elem_id="timing")
    with gr.Accordion("Details of the run", open=False):
        r["facts"] = gr.HTML(show["facts"], elem_classes="plain", elem_id="facts")
    with gr.Accordion("Take it along: JSON, Python, link", open=False, elem_id="export"):
        r["download"] = gr.DownloadButton("Download the run as JSON", show["download"], size="sm")
        r["code"] = gr.Code(
            show["code"], language="python", label="The same run in Python", max_lines=18, elem_id="code"
        )
        r["link"] = gr.HTML(show["link"], elem_classes="plain")
    r["result"] = gr.State(RECORDED)
    return r


def first_forecast() -> str:
    return foreseen(forecast(DEFAULT, SPEC.layers, RECORDED["dense"]["prompt_tokens"], SPEC))


def recorded_status() -> str:
    text = f"Recorded on {RECORDED['machine']}, {date(RECORDED['date'])}, with {COMMAND}. Press Run for your own."
    return answers.status(text, "recorded")


def chosen_example(index: int, model):
    """What an example sets: the prompt and its pictures, the answer's length, and the model if it names another one,
    which is then to be loaded."""
    example = EXAMPLES[index or 0]
    wanted = example.get("model", model)
    asks = (gr.skip(), gr.skip()) if wanted == model else (wanted, f"{wanted} {uuid.uuid4()}")
    return example["prompt"], pictures(example), example["max_new_tokens"], *asks


def fitting_example(model, prompt, images):
    """The example of a model that was picked, in place of one that was made for another."""
    at = example_for(model, prompt, EXAMPLES, images)
    if at is None:
        return (gr.skip(),) * 4
    return at, *chosen_example(at, model)[:3]


def looked_ahead(model, prompt, style, *rest):
    """What the plan would do, while its controls move. rest: the plan, then the pictures and their most tokens."""
    plan, seen = rest[: len(PLAN)], rest[len(PLAN) :]
    try:
        return foresee(model, prompt, read_plan(*plan), False if style == "plain" else None, *seen)
    except PopError as error:
        return answers.note(str(error), "problem")


def opened(request: gr.Request):
    """The settings of the link that opened the page; without any, what a visitor may be typing is left alone."""
    if not set(KEYS) & set(request.query_params):
        return gr.skip()
    model, plan, sentence = read_query(dict(request.query_params), DEFAULT.prefill)
    cut, channels, spec = plan.prefill, plan.channels or ChannelPruning(**OFF), spec_of(model)
    layers = spec.layers if spec else max(cut.cutoff, SPEC.layers)
    if cut.cutoff > min(layers, MOST_LAYERS):
        layers = min(layers, MOST_LAYERS)
        sentence = (
            f"{sentence} The link's cutoff is {cut.cutoff}, but {model} has {layers} layers; the default is used."
        )
        cut = replace(cut, cutoff=default_plan(layers).prefill.cutoff)
    cutoff = gr.update(maximum=layers, value=cut.cutoff)
    ratio = gr.update(maximum=max(MOST_RATIO, channels.ratio), value=channels.ratio)
    settings = cutoff, cut.kv, cut.sinks, cut.boundary, ratio, channels.width, channels.rescore
    return model, *settings, answers.alert(sentence.strip()), linked_status(model, cut.cutoff, channels.ratio)


def linked_status(model: str, cutoff: int, ratio: float) -> str:
    below = RECORDED["pruned"]["plan"]["prefill"]["cutoff"]
    left_out = f", prune ratio {ratio:g}" if ratio else ""
    text = (
        f"Set by a link: cutoff {cutoff} of {model}{left_out}; press Run. Below, {DEFAULT_MODEL} at cutoff {below}, "
        f"recorded on {RECORDED['machine']}, {date(RECORDED['date'])}"
    )
    return answers.status(text, "recorded")


def wire(demo: gr.Blocks, c: dict, r: dict) -> None:
    """Connect the events. Events that run a model take turns; the others answer at once."""
    events = ModelEvents(c | r, NAMES, OUTPUTS)
    ahead = [c[name] for name in ("model", "prompt", "style", *PLAN, "images", "image_tokens")]
    for triggers, work in (
        ([c["run"].click, c["prompt"].submit], comparing.run),
        ([c["fit_button"].click], comparing.fit),
        ([c["model"].input, c["asked"].change], comparing.pick),
    ):
        done = events.connect(triggers, work).then(looked_ahead, ahead, c["forecast"], **AT_ONCE)
        done.then(picture_update, *pictures_seen(c), **AT_ONCE)
    events.connect_stop(demo)
    moved = [c["prompt"].blur, *(c[name].change for name in ("style", *PLAN, "images", "image_tokens"))]
    gr.on(moved, looked_ahead, ahead, c["forecast"], trigger_mode="always_last", **AT_ONCE)
    connect_pictures(c)
    filled = [c[name] for name in ("prompt", "images", "max_new_tokens")]
    chosen = [c["example"], c["model"]]
    for choice in (
        # in the queue, as only events of the queue tell the page that a State has changed
        c["example"].input(chosen_example, chosen, [*filled, c["model"], c["asked"]], **AT_ONCE | {"queue": True}),
        c["model"].input(
            fitting_example, [c[name] for name in ("model", "prompt", "images")], [c["example"], *filled], **AT_ONCE
        ),
    ):
        choice.then(looked_ahead, ahead, c["forecast"], **AT_ONCE)
    demo.load(opened, None, [*(c[name] for name in ("model", *PLAN)), r["alert"], r["status"]], **AT_ONCE)
    gr.api(api.compare, api_name="compare", **MODEL_QUEUE)


with gr.Blocks(title="POP Studio", delete_cache=(3600, 3600), analytics_enabled=False) as demo:
    wire(demo, *two_columns(INTRO, form, results))
