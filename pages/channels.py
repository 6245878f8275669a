"""Channels: which FFN channels a prompt keeps, which ones every token chooses, and how that stands beside its peers."""

import gradio as gr

from pop_core.channel_words import plan_sentence
from pop_core.errors import PopError
from pop_core.forecast import forecast
from pop_core.plan import CANDIDATES, L2, MAX, SUM, WIDTH, Plan, PrefillCut

from . import answers, choosing
from .background import STOPS
from .choosing import MOST_TOKENS, NAMES, RECORDED
from .controls import channel_controls, model_picker, run_buttons, two_columns
from .examples import example_for, examples_of_models, load_examples, pictures, titles
from .links import CHANNELS, read_query
from .picture_box import connect_pictures, picture_box, picture_update, pictures_seen
from .results import Results, heading
from .shared import DEFAULT_MODEL, MAX_CHARACTERS
from .turns import AT_ONCE, ModelEvents

RATIO = 0.4  # of the page when it opens
FIGURES = (
    *("caption", "pictures", "panes", "answers_note", "pieces", "regions", "regions_note"),
    *("layer", "choices", "choices_note"),
    *("overlap", "overlap_note", "quality", "quality_note", "speed", "speed_note", "methods"),
    *("single", "mixture", "experts", "experts_note", "method_table", "layer_table", "facts"),
)
OUTPUTS = ("alert", "status", "notices", *FIGURES, "link", "compare", "json", "methods_csv", "layers_csv", "result")
SCORES = {SUM: "Sum of magnitudes", L2: "L2 norm", MAX: "Largest magnitude"}
EXAMPLES = load_examples() + examples_of_models()
INTRO = """<header class="intro"><p class="brand">POP Studio</p>
<h1>Which channels a prompt keeps, and which a token chooses</h1>
<p>Most of a layer's work is done by a part of its FFN channels, and which part depends on the text. The prompt decides
once which channels stay, go, or are candidates; while the model writes, every token chooses among the candidates
anew.</p></header>"""


def form() -> dict:
    """The left column: what to study, by the name of the setting."""
    c = {"model": model_picker(), "notices": gr.HTML(elem_classes="plain")}
    c["example"] = gr.Dropdown(
        [(title, at) for at, title in enumerate(titles(EXAMPLES))], value=0, label="Example", elem_id="example"
    )
    c |= picture_box()
    c["prompt"] = gr.Textbox(
        EXAMPLES[0]["prompt"], label="Prompt", lines=6, max_lines=8, max_length=MAX_CHARACTERS, elem_id="prompt"
    )
    c |= channel_controls(RATIO)._asdict()
    c["ahead"] = gr.HTML(looked_ahead(DEFAULT_MODEL, RATIO, WIDTH, CANDIDATES), elem_classes="plain", elem_id="ahead")
    c["peers"] = gr.Checkbox(
        True,
        label="Compare with the peers",
        info="Wanda-sp, FLAP and ShortGPT, which read calibration text once for each model. GRIFFIN is always there.",
        elem_id="peers",
    )
    c |= run_buttons()
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        c["max_new_tokens"] = gr.Number(
            48, label="Answer length", info=f"tokens at most, up to {MOST_TOKENS}", elem_id="max_new_tokens"
        )
        c["score"] = gr.Radio(
            [(title, name) for name, title in SCORES.items()],
            value=SUM,
            label="Weight of a channel in its score",
            info="How its column of the down projection is put together, times the norm of its activations.",
            elem_id="score",
        )
    return c


def column() -> dict:
    """The right column, filled with the recorded study of the default model."""
    show = recorded_result(DEFAULT_MODEL, None)
    results = Results(show)
    r = results.parts
    for name in ("caption", "pictures", "panes", "answers_note"):
        results.words(name)
    with gr.Accordion("The tokens of both answers", open=False, elem_id="pieces_box"):
        results.words("pieces")
    with gr.Column(visible=show["single"]["visible"], elem_id="single") as r["single"]:
        results.figure("regions", "What the prompt decides: retained, candidates, pruned")
        heading("What every token chooses")
        r["layer"] = gr.Slider(
            *(0, show["layer"]["maximum"]), value=show["layer"]["value"], step=1, label="Layer", elem_id="layer"
        )
        with gr.Column(elem_classes="sideways", elem_id="sideways"):
            results.plot("choices")
        results.words("choices_note")
        results.figure("overlap", "Does the next token choose the same?")
    with gr.Column(visible=show["mixture"]["visible"], elem_id="mixture") as r["mixture"]:
        results.figure("experts", "The experts that the prompt reached")
    with gr.Row(elem_classes="pair"):
        for name, title in (("quality", "How close to the dense model"), ("speed", "How fast it writes")):
            with gr.Column(min_width=300):
                results.figure(name, title)
    results.words("compare")
    with gr.Accordion("The methods, and where they come from", open=False, elem_id="about"):
        results.words("methods")
    with gr.Accordion("The numbers as tables", open=False, elem_id="numbers"):
        results.table("method_table")
        results.table("layer_table")
    with gr.Accordion("Details of the run", open=False):
        results.words("facts")
    with gr.Accordion("Take it along: CSV, JSON, link", open=False, elem_id="export"):
        results.download("methods_csv", "Download the methods as CSV")
        results.download("layers_csv", "Download the layers as CSV")
        results.download("json", "Download the result as JSON")
        results.words("link")
    r["result"] = gr.State(show["result"])
    return r


def recorded_result(model: str, layer) -> dict:
    """Everything that shows the recorded study of a model."""
    result, _, command = RECORDED[model]
    text = f"Recorded with {command}. Press Run for your own."
    shown = choosing.shown(result, layer) | choosing.data_files(result, f"recorded {model}")
    return shown | {"status": answers.status(text, "recorded"), "alert": "", "notices": ""}


def picked(model, layer) -> dict:
    """A recorded study if there is one; the model itself is loaded by Run."""
    if model in tuple(RECORDED):
        return recorded_result(model, layer)
    text = "There is no recorded study of this model: press Run. The figures are still those of the one before"
    return {"status": answers.status(text, "recorded"), "alert": "", "notices": ""}


def filled(example: dict) -> dict:
    """What an example puts into the controls."""
    return {"prompt": example["prompt"], "images": pictures(example)}


def looked_ahead(model, ratio, width, rescore) -> str:
    """What a plan would do, while its controls move."""
    try:
        pruning, spec = choosing.read_pruning(ratio, width, rescore), choosing.shape_of(model)
        layers = spec.layers if spec else 1
        return answers.note(plan_sentence(forecast(Plan(channels=pruning), layers, None, spec).channels))
    except PopError as error:
        return answers.note(str(error), "problem")


def linked(parameters: dict) -> dict:
    """The settings of a link, and what is recorded of its model."""
    model, plan, sentence = read_query(parameters, PrefillCut(1), RATIO)
    score = parameters.get("score", SUM)
    if score not in tuple(SCORES):
        sentence = f"{sentence} The link's score is {str(score)[:40]!r}; it must be one of {', '.join(SCORES)}.".strip()
        score = SUM
    shown = picked(model, None) | {"model": model, "alert": answers.alert(sentence), "score": score}
    return shown | ({key: getattr(plan.channels, key) for key in CHANNELS} if plan.channels else {"ratio": 0})


def wire(demo: gr.Blocks, c: dict, r: dict) -> None:
    """Connect the events. Events that run a model take turns; the others answer at once."""
    everything = c | r
    events = ModelEvents(everything, NAMES, OUTPUTS)

    def chosen(result, layer, request: gr.Request):
        return events.when_idle(lambda *two: choosing.chosen(*two) | {"alert": ""}, result, layer, request=request)

    def picked_in(model, prompt, images, layer, request: gr.Request):
        at = example_for(model, prompt, EXAMPLES, images)
        fitting = {} if at is None else {"example": at} | filled(EXAMPLES[at])
        return events.when_idle(lambda: picked(model, layer) | fitting, request=request)

    def example_in(index, model, layer, request: gr.Request):
        example = EXAMPLES[index or 0]
        update, wanted = filled(example), example.get("model", model)
        if wanted != model:
            update |= {"model": wanted}
            if not STOPS.working(str(request.session_hash)):
                update |= picked(wanted, layer)
        return events.named(update)

    def opened(request: gr.Request):
        if not {"model", "score", *CHANNELS} & set(request.query_params):
            return gr.skip()
        return events.named(linked(dict(request.query_params)))

    outputs = [everything[name] for name in OUTPUTS]
    ahead_of = [c[name] for name in ("model", *CHANNELS)]
    events.connect([c["run"].click, c["prompt"].submit], choosing.run).then(
        looked_ahead, ahead_of, c["ahead"], **AT_ONCE
    ).then(picture_update, *pictures_seen(c), **AT_ONCE)
    events.connect_stop(demo)
    connect_pictures(c)
    prompts = [c[name] for name in ("example", "prompt", "images")]
    pick = [c["model"], c["prompt"], c["images"], r["layer"]]
    c["model"].input(picked_in, pick, [*prompts, *outputs], **AT_ONCE)
    gr.on([part.change for part in ahead_of], looked_ahead, ahead_of, c["ahead"], trigger_mode="always_last", **AT_ONCE)
    choice = [c["example"], c["model"], r["layer"]]
    c["example"].input(example_in, choice, [c["model"], *prompts, *outputs], **AT_ONCE)
    shown = [r[name] for name in ("alert", "choices", "choices_note")]
    r["layer"].change(chosen, [r["result"], r["layer"]], shown, trigger_mode="always_last", **AT_ONCE)
    settings = [c[name] for name in ("model", *CHANNELS, "score")]
    demo.load(opened, None, [*settings, *outputs], **AT_ONCE)


with gr.Blocks(title="Channels · POP Studio", delete_cache=(3600, 3600), analytics_enabled=False) as demo:
    wire(demo, *two_columns(INTRO, form, column))
