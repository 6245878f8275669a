"""The controls that pages share: which model, which plan, and a forecast of what the plan will do."""

import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import gradio as gr

from pop_core.errors import PopError
from pop_core.forecast import Forecast, default_plan, forecast, token_count
from pop_core.plan import ALL, CANDIDATES, FITTED, NONE, OWN, WIDTH, ChannelPruning, Plan, PrefillCut, whole_number
from pop_core.sentences import plan_sentence

from . import answers
from .picture_box import read_images
from .shared import DEFAULT_MODEL, EMBEDDED, MAX_CHARACTERS, MODELS, spec_of

PlanControls = namedtuple("PlanControls", "cutoff kv sinks boundary")
ChannelControls = namedtuple("ChannelControls", "ratio width rescore")
MOST_RATIO = 0.9  # on the slider; a link or a client may ask for more
RESCORES = {CANDIDATES: "Candidates", NONE: "None: a fixed mask", ALL: "All channels"}


def two_columns(intro: str, form: Callable[[], dict], results: Callable[[], dict]) -> tuple[dict, dict]:
    """The layout of every page: its name among the others, what it is about, controls beside results."""
    gr.Navbar(main_page_name="Compare")
    gr.HTML(intro, elem_classes="plain")
    with gr.Row(elem_classes="page"):
        with gr.Column(scale=5, min_width=320):
            controls = form()
        with gr.Column(scale=9, min_width=320):
            outputs = results()
    return controls, outputs


def model_picker() -> gr.Dropdown:
    """The embedded models, or whatever a visitor types."""
    return gr.Dropdown(
        [(f"{title} · built in", name) for name, title in EMBEDDED.items()],
        value=DEFAULT_MODEL,
        allow_custom_value=True,
        label="Model",
        info="Or type a Hugging Face id (owner/name), a local folder or a .gguf file, then press Enter.",
        elem_id="model",
    )


def run_buttons() -> dict:
    """Run, and the Stop beside it."""
    with gr.Row(elem_classes="actions"):
        run = gr.Button("Run", variant="primary", scale=3, min_width=120, elem_id="run")
        stop = gr.Button("Stop", variant="stop", scale=1, min_width=80, interactive=False, elem_id="stop")
    return {"run": run, "stop_button": stop}


# A slider hands on whatever was typed: what cannot be used is answered with a sentence, not with a 500. On the class,
# since Gradio makes a new slider of one that an update changes.
gr.Slider.preprocess = lambda self, payload: payload


def cutoff_slider(layers: int) -> gr.Slider:
    """How many layers read the prompt."""
    return gr.Slider(
        1,
        layers,
        value=default_plan(layers).prefill.cutoff,
        step=1,
        label="Layers that read the prompt",
        elem_id="cutoff",
    )


def plan_details(cutoff: gr.Slider, default: PrefillCut) -> PlanControls:
    """The rest of a plan, for whoever opens the details."""
    kv = gr.Radio(
        [("Fitted", FITTED), ("Own", OWN)],
        value=default.kv,
        label="Keys and values of the skipped layers",
        info="Own: the skipped layers' own weights, as in the paper. Fitted: weights refitted once for each model, "
        "closer to the dense model at the same speed.",
        elem_id="kv",
    )
    with gr.Row():
        sinks = gr.Number(
            default.sinks, label="Sinks", info="First prompt tokens that still run every layer.", elem_id="sinks"
        )
        boundary = gr.Number(
            default.boundary,
            label="Boundary",
            info="Last prompt tokens that still run every layer.",
            elem_id="boundary",
        )
    return PlanControls(cutoff, kv, sinks, boundary)


def ratio_slider(ratio: float) -> gr.Slider:
    """How many FFN channels write."""
    return gr.Slider(
        0,
        MOST_RATIO,
        value=ratio,
        step=0.05,
        label="FFN channels left out while writing",
        info="The prune ratio: the share of each FFN's channels that add nothing to a token. 0: none.",
        elem_id="ratio",
    )


def channel_details(left_out: gr.Slider) -> ChannelControls:
    """The rest of channel pruning, for whoever opens the details."""
    width = gr.Slider(
        0,
        1,
        value=WIDTH,
        step=0.02,
        label="Candidate width",
        info="The share of the channels that every token chooses from anew, half of them on either side of the line.",
        elem_id="width",
    )
    rescore = gr.Radio(
        [(title, name) for name, title in RESCORES.items()],
        value=CANDIDATES,
        label="Scored again at every token",
        elem_id="rescore",
    )
    return ChannelControls(left_out, width, rescore)


def channel_controls(ratio: float) -> ChannelControls:
    """Which FFN channels write: how many are left out, and how they are chosen."""
    return channel_details(ratio_slider(ratio))


def read_channels(ratio, width, rescore) -> ChannelPruning | None:
    """Channel pruning of raw values, None where nothing is pruned. Raises `PopError`."""
    pruning = ChannelPruning(ratio, width, rescore)
    return pruning if pruning.ratio else None


def read_plan(cutoff, kv, sinks, boundary, ratio=0, width=WIDTH, rescore=CANDIDATES) -> Plan:
    """The plan of raw values, from a page or from anybody's client. Raises `PopError`."""
    return Plan(PrefillCut(cutoff, kv, sinks, boundary), read_channels(ratio, width, rescore))


def read_prompt(prompt) -> str:
    """A prompt as it was typed. Raises `PopError` for none, and for one that is too long for a page."""
    prompt = prompt if isinstance(prompt, str) else ""
    if not prompt.strip():
        raise PopError("The prompt is empty; type some text.")
    if len(prompt) > MAX_CHARACTERS:
        raise PopError(f"The prompt has {len(prompt):,} characters; this page takes at most {MAX_CHARACTERS:,}.")
    return prompt


def whole_between(value, name: str, low: int, high: int) -> int:
    """A whole number in a range. Raises `PopError`."""
    number = whole_number(value, name)
    if not low <= number <= high:
        raise PopError(f"The {name} is {number:,}; it must be between {low} and {high:,}.")
    return number


def foresee(model: str, text: str, plan: Plan, chat: bool | None, images=None, image_tokens=None) -> str:
    """The forecast as HTML: the strip of layers and its sentence. Raises `PopError` for a plan that this model cannot
    run, as far as that is known before it is loaded."""
    engine, spec = MODELS.loaded(model), spec_of(model)
    if spec is None:
        return answers.note("What the plan does is shown once this model is loaded.")
    tokens = None
    if engine:
        engine.check(plan, bool(images) and spec.sees)
        tokens = prompt_tokens(engine, text, chat, images, image_tokens)
    return foreseen(forecast(plan, spec.layers, tokens, spec))


def prompt_tokens(engine, text: str, chat: bool | None, images=None, image_tokens=None) -> int | None:
    """Tokens of a prompt with its pictures; None where one of them, or the text, cannot be used, which is said
    elsewhere."""
    if not images or not engine.spec.sees:
        return token_count(engine, text, chat)
    from pop_core.vision import checked_most

    try:
        pictures = tuple((path, Path(path).stat().st_mtime_ns) for path in read_images(images))
        return _prompt_tokens(weakref.ref(engine), text, chat, pictures, checked_most(image_tokens or None))
    except PopError:
        return None


@lru_cache(maxsize=16)
def _prompt_tokens(engine, text: str, chat: bool | None, pictures: tuple, image_tokens) -> int:
    from pop_core.text import encode_prompt

    images, loaded = [path for path, _ in pictures], engine().loaded
    return len(encode_prompt(loaded.tokenizer, text, chat, engine().eyes, images, image_tokens).ids)


def foreseen(seen: Forecast) -> str:
    """A forecast as HTML."""
    return answers.strip(seen.layers, seen.kept, seen.channels) + answers.note(plan_sentence(seen))
