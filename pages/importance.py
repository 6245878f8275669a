"""Importance: how much each layer matters to reading and to writing, and the cutoff that follows from it."""

import gradio as gr

from pop_core.errors import PopError
from pop_core.importance import TOLERANCE
from pop_core.importance_plots import layers_preview

from . import analysing, analysis_settings, answers
from .analysis_settings import ALL_KINDS, CHOICES, FILE, NAMES, OWN_TEXT, PICTURE, PICTURES, SCENES
from .controls import model_picker, run_buttons, two_columns
from .links import read_model
from .picture_box import may_see, picture_box, seen_pictures
from .results import Results, heading
from .shared import DEFAULT_MODEL, IMPORTANCE, MAX_CHARACTERS, MODELS, spec_of
from .turns import AT_ONCE, ModelEvents

FIGURES = ("caption", "preview", "layers", "layers_note", "choice", "curve", "curve_note", "report")
OVERLAY = ("overlay", "overlay_note")
SCENES_PARTS = ("scenes_box", "scenes", "scenes_note")
PICTURE_PARTS = ("over", "pictures", "layer", *OVERLAY, *SCENES_PARTS)  # there for results with pictures only
REST = ("ablation", "ablation_note", "tokens", "tokens_note", "table", "facts", "json", "csv", "result")
OUTPUTS = ("alert", "status", "notices", *FIGURES, *REST, *PICTURE_PARTS)
SOURCE_PARTS = ("own", "file", "picture_box", "question", "prompt_tokens")  # of which each source has its own
SEES_SHAPES = "shapes-vl"  # knows the words about generated pictures, and no others
FLOAT32 = 4  # bytes a number, of an embedded model that is not loaded yet
INTRO = """<header class="intro"><p class="brand">POP Studio</p>
<h1>Which layers read, and which write</h1>
<p>How much does an answer depend on each layer: while the model reads your prompt (prefill), and while it writes
(decode)? A virtual gate on every branch measures it. Layers that reading hardly needs can be skipped there, so that the
first word comes sooner.</p></header>"""


def form() -> dict:
    """The left column: what to analyse, by the name of the setting."""
    c = {"model": model_picker(), "notices": gr.HTML(elem_classes="plain")}
    choices = [(title, name) for name, title in CHOICES.items()]
    c["source"] = gr.Dropdown(choices, value=ALL_KINDS, label="Text", elem_id="source")
    c["own"] = gr.Textbox(
        label="Your text",
        info="Samples are cut from it; a few thousand words make good ones.",
        lines=6,
        max_lines=10,
        max_length=MAX_CHARACTERS,
        visible=False,
        elem_id="own",
    )
    c["file"] = gr.File(
        label="A UTF-8 text file, 1 MB at most", file_types=["text"], height=120, visible=False, elem_id="file"
    )
    c |= picture_box(visible=False)
    c["question"] = gr.Textbox(
        label="Your question",
        info="The model's own answer to it is what it writes in every sample.",
        max_length=MAX_CHARACTERS,
        visible=False,
        elem_id="question",
    )
    with gr.Row():
        c["samples"] = gr.Number(16, label="Samples", info="prompts read", min_width=90, elem_id="samples")
        c["prompt_tokens"] = gr.Number(128, label="Prompt", info="tokens read", min_width=90, elem_id="prompt_tokens")
        c["new_tokens"] = gr.Number(32, label="Answer", info="tokens written", min_width=90, elem_id="new_tokens")
    c["ahead"] = gr.HTML(looked_ahead(DEFAULT_MODEL, 16, 128, 32, 0), elem_classes="plain", elem_id="ahead")
    c |= run_buttons()
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        c["ablated"] = gr.Number(
            0,
            label="Really leave out each layer",
            info="On this many of the samples, to see whether the gates are right. Each takes as long as ten others.",
            elem_id="ablated",
        )
        c["seed"] = gr.Number(0, label="Seed", info="of the labels that the model draws", elem_id="seed")
    return c


def column() -> dict:
    """The right column, filled with the recorded result of the default model."""
    show = recorded_result(DEFAULT_MODEL, 100 * TOLERANCE)
    results = Results(show)
    r = results.parts
    heading("What each layer matters to")
    results.words("caption")
    r["preview"] = gr.HTML(layers_preview(IMPORTANCE[DEFAULT_MODEL][0]), elem_classes="plain")
    results.plot("layers")
    results.words("layers_note")
    with gr.Row(elem_classes="choose"):
        r["tolerance"] = gr.Slider(
            0,
            50,
            value=100 * TOLERANCE,
            step=0.5,
            label="Tolerance: percent of the reading importance that may be skipped",
            scale=3,
            min_width=260,
            elem_id="tolerance",
        )
        with gr.Column(scale=2, min_width=220):
            results.words("choice")
    with gr.Row(elem_classes="pair"):
        for name, title in (("curve", "What a cutoff skips"), ("ablation", "Really leaving each layer out")):
            with gr.Column(min_width=300):
                results.figure(name, title)
    heading("One sample, token by token")
    with gr.Column(elem_classes="sideways", elem_id="sideways"):
        results.plot("tokens")
    results.words("tokens_note")
    with gr.Column(visible=False, elem_id="over") as r["over"]:
        heading("The same over the picture")
        results.words("pictures")
        r["layer"] = gr.Slider(0, 1, value=0, step=1, label="Layer", elem_id="layer")
        results.plot("overlay")
        results.words("overlay_note")
    with gr.Column(visible=False, elem_id="scenes_box") as r["scenes_box"]:
        results.figure("scenes", "What a cutoff costs in answers about pictures")
    with gr.Accordion("The numbers as a table", open=False, elem_id="numbers"):
        results.table("table")
    with gr.Accordion("Details of the analysis", open=False):
        results.words("facts")
    with gr.Accordion("Take it along: CSV, JSON, HTML", open=False, elem_id="export"):
        results.download("csv", "Download the table as CSV")
        results.download("json", "Download the result as JSON")
        r["make_report"] = gr.Button("Make one HTML file of the figures", size="sm", elem_id="make_report")
        r["report"] = gr.DownloadButton(
            "Download the figures as HTML", size="sm", visible=False, elem_id="report", variant="primary"
        )
    r["result"] = gr.State(IMPORTANCE[DEFAULT_MODEL][0])
    return r


def recorded_result(model: str, tolerance) -> dict:
    """Everything that shows the recorded result of an embedded model."""
    result, _, command = IMPORTANCE[model]
    text = f"Recorded with {command}. Press Run for your own."
    shown = analysing.shown(result, tolerance) | analysing.data_files(result, f"recorded {model}")
    return shown | {"status": answers.status(text, "recorded"), "alert": "", "notices": ""}


def picked(model, tolerance) -> dict:
    """A recorded result if there is one; the model itself is loaded by Run."""
    if model in IMPORTANCE:
        return recorded_result(model, tolerance)
    text = "There is no recorded result of this model: press Run. The figures are still those of the one before"
    return {"status": answers.status(text, "recorded"), "alert": "", "notices": ""}


def looked_ahead(model, samples, prompt_tokens, new_tokens, ablated, source=ALL_KINDS) -> str:
    """What an analysis would need, while its settings change."""
    raw = dict(model=model, source=SCENES if source in PICTURES else ALL_KINDS, own="", file=None, images=None)
    raw |= dict(question="", seed=0, tolerance=100 * TOLERANCE)
    raw |= dict(samples=samples, prompt_tokens=prompt_tokens, new_tokens=new_tokens, ablated=ablated)
    engine, spec = MODELS.loaded(model), spec_of(model)
    try:
        if source in PICTURES and not may_see(model):
            raise PopError(f"{model} reads text only and cannot see a picture; pick {SEES_SHAPES}, or a text.")
        settings = analysis_settings.read_settings(**raw)
        if spec is None and source not in PICTURES:
            return answers.note("How much memory this takes is known once the model is loaded.")
        itemsize = engine.loaded.dtype.itemsize if engine else FLOAT32
        return answers.note(analysis_settings.looked_ahead(spec, itemsize, settings))
    except PopError as error:
        return answers.note(str(error), "problem")


def fitting_source(model, source) -> str:
    """What to read with a model that was just picked: the source that there is, if it can use it."""
    if model == SEES_SHAPES and source not in PICTURES:
        return SCENES
    return ALL_KINDS if source in PICTURES and not may_see(model) else source


def source_parts(source) -> list[dict]:
    """Updates of `SOURCE_PARTS`."""
    of_picture = source == PICTURE
    seen = (source == OWN_TEXT, source == FILE, of_picture, of_picture, source not in PICTURES)
    return [gr.update(visible=visible) for visible in seen]


def wire(demo: gr.Blocks, c: dict, r: dict) -> None:
    """Connect the events. Events that run a model take turns; the others answer at once."""
    everything = c | r
    events, tolerance = ModelEvents(everything, NAMES, OUTPUTS), [r["result"], r["tolerance"]]

    def chosen(result, tolerance, request: gr.Request):
        return events.when_idle(lambda *two: analysing.chosen(*two) | {"alert": ""}, result, tolerance, request=request)

    def picked_in(model, tolerance, request: gr.Request):
        return events.when_idle(picked, model, tolerance, request=request)

    def moved_layer(result, layer, request: gr.Request):
        return events.when_idle(lambda *two: analysing.in_layer(*two) | {"alert": ""}, result, layer, request=request)

    def moved_meanwhile(result, tolerance, request: gr.Request):
        """The slider may have moved while the analysis ran with what it was before."""
        moved = tolerance != 100 * result["tolerance"]
        return events.when_idle(analysing.chosen, result, tolerance, request=request) if moved else gr.skip()

    def opened(request: gr.Request):
        if "model" not in request.query_params:
            return gr.skip()
        model, sentence = read_model(dict(request.query_params))
        shown = picked(model, 100 * TOLERANCE) | {"model": model, "source": fitting_source(model, ALL_KINDS)}
        return events.named(shown | {"alert": answers.alert(sentence)})

    def reported(result, tolerance, request: gr.Request):
        return gr.update(value=analysing.report_file(result, tolerance, str(request.session_hash)), visible=True)

    outputs = [everything[name] for name in OUTPUTS]
    shown = [r[name] for name in ("alert", *FIGURES)]
    events.connect([c["run"].click], analysing.run).then(moved_meanwhile, tolerance, shown, **AT_ONCE)
    events.connect_stop(demo)
    c["model"].input(picked_in, [c["model"], r["tolerance"]], outputs, **AT_ONCE)
    c["model"].input(fitting_source, [c["model"], c["source"]], c["source"], **AT_ONCE)
    c["source"].change(source_parts, c["source"], [c[name] for name in SOURCE_PARTS], **AT_ONCE)
    looked_at = [c["model"], c["images"]]
    gr.on(
        [part.change for part in looked_at], seen_pictures, looked_at, c["seen"], trigger_mode="always_last", **AT_ONCE
    )
    ahead = [c[name] for name in ("model", "samples", "prompt_tokens", "new_tokens", "ablated", "source")]
    gr.on([part.change for part in ahead], looked_ahead, ahead, c["ahead"], trigger_mode="always_last", **AT_ONCE)
    r["tolerance"].change(chosen, tolerance, shown, trigger_mode="always_last", **AT_ONCE)
    over = [r["result"], r["layer"]], [r[name] for name in ("alert", *OVERLAY)]
    r["layer"].input(moved_layer, *over, trigger_mode="always_last", **AT_ONCE)
    r["make_report"].click(reported, tolerance, r["report"], **AT_ONCE)
    demo.load(opened, None, [c["model"], c["source"], *outputs], **AT_ONCE)


with gr.Blocks(title="Importance · POP Studio", delete_cache=(3600, 3600), analytics_enabled=False) as demo:
    wire(demo, *two_columns(INTRO, form, column))
