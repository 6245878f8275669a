"""The controls that pages share: which model, which plan, and a forecast of what the plan will do."""

import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import gradio as gr

from pop_core.errors import PopError
from pop_core.forecast import Forecast, default_plan, forecast, token_count
from pop_core.pictures import MOST_PICTURES, open_picture, thumbnail
from pop_core.plan import ALL, CANDIDATES, FITTED, NONE, OWN, WIDTH, ChannelPruning, Plan, PrefillCut, whole_number
from pop_core.sentences import plan_sentence

from . import answers
from .shared import DEFAULT_MODEL, EMBEDDED, MAX_CHARACTERS, MODELS, explain, spec_of
from .turns import AT_ONCE

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


def picture_box() -> dict:
    """`picture_controls` in a box that is open while the model may have eyes: `connect_pictures` sees to that."""
    # the box, since Gradio makes a new component of one that an update changes, and forgets how it reads its files
    with gr.Column(visible=may_see(DEFAULT_MODEL)) as box:
        return {"picture_box": box} | picture_controls(visible=True)


def picture_controls(visible: bool | None = None) -> dict:
    """Pictures in front of the prompt, and what the model is given of them. visible: None while the default model may
    have eyes."""
    images = gr.File(
        label="Pictures, in front of the prompt",
        file_count="multiple",
        file_types=["image"],
        height=120,
        visible=may_see(DEFAULT_MODEL) if visible is None else visible,
        elem_id="images",
    )
    # `open_picture` is the one that judges a file, by what is in it
    images.preprocess = lambda payload: [file.path for file in payload] if payload else None
    return {"images": images, "seen": gr.HTML(elem_classes="plain", elem_id="seen")}


def connect_pictures(c: dict) -> None:
    """Show what the model is given of the pictures whenever they or the model change. c: a page's components, by name;
    those of `picture_box`, "model", and "image_tokens" where the page has that."""
    looked_at, shown = pictures_seen(c)
    changes = [part.change for part in looked_at]
    gr.on(changes, picture_update, looked_at, shown, trigger_mode="always_last", **AT_ONCE)


def pictures_seen(c: dict) -> tuple[list, list]:
    """Inputs and outputs of `picture_update`."""
    looked_at = [c[name] for name in ("model", "images", "image_tokens") if name in c]
    return looked_at, [c["picture_box"], c["seen"]]


def picture_update(model, images, image_tokens=None) -> tuple[dict, str]:
    """Updates of "picture_box" and "seen". Pictures that are there stay in sight, so that they can be taken away."""
    return gr.update(visible=may_see(model) or bool(images)), seen_pictures(model, images, image_tokens)


def may_see(model) -> bool:
    """Whether a model takes pictures, as far as that is known before it is loaded."""
    spec = spec_of(model)
    return spec is None or spec.sees


def seen_pictures(model, images, image_tokens=None) -> str:
    """HTML of what a model is given of each picture: upright, with its size and, once the model is loaded, its tokens.
    Errors are sentences in their place."""
    try:
        paths = read_images(images)
        if paths and not may_see(model):
            raise PopError(f"{model} reads text only and cannot see a picture; take it away, or pick shapes-vl.")
    except PopError as error:
        return answers.note(str(error), "problem")
    engine, facts, said = MODELS.loaded(model), [], []
    for path in paths:
        try:
            fact, notices = picture_facts(engine, path, image_tokens)
            facts.append(fact | {"name": Path(path).name})
            said += [answers.note(notice) for notice in notices]
        except Exception as error:
            said.append(answers.note(f"{Path(path).name[:80]}: {explain(error)}", "problem"))
    return answers.pictures(facts) + "".join(dict.fromkeys(said))


def picture_facts(engine, path: str, image_tokens=None) -> tuple[dict, tuple[str, ...]]:
    """(facts, notices) of a picture as `Pixels` has them; without an engine only what the file alone tells. Kept for a
    while, as sliders ask again and again. Raises `PopError`."""
    return _facts_of(weakref.ref(engine) if engine else None, path, Path(path).stat().st_mtime_ns, image_tokens or None)


@lru_cache(maxsize=128)
def _facts_of(engine, path: str, changed: int, image_tokens) -> tuple[dict, tuple[str, ...]]:
    if engine:
        pixels = engine().eyes.prepare([path], image_tokens)
        return pixels.facts[0], pixels.notices
    picture = open_picture(path)
    known = {"width": picture.width, "height": picture.height, "thumbnail": thumbnail(picture.image)}
    return known, picture.notices


def read_images(value) -> list[str]:
    """The paths of uploaded pictures, in the order of the prompt, from None, one path or a list. What is in the files
    is judged by the model's run. Raises `PopError`."""
    paths = value if isinstance(value, (list, tuple)) else [value] if value else []
    check_number_of_pictures(paths)
    for path in paths:
        if not isinstance(path, str):
            raise PopError(f"A picture is {str(path)[:40]!r}; it must be an uploaded file.")
        if not Path(path).is_file():
            raise PopError(f"The picture {Path(path).name[:80]} is no longer on the server; upload it again.")
    return [str(path) for path in paths]


def check_number_of_pictures(images) -> None:
    """Raises `PopError` for more than a prompt takes."""
    if len(images) > MOST_PICTURES:
        raise PopError(f"There are {len(images):,} pictures; a prompt takes at most {MOST_PICTURES}.")


def run_buttons() -> dict:
    """Run, and the Stop beside it."""
    with gr.Row(elem_classes="actions"):
        run = gr.Button("Run", variant="primary", scale=3, min_width=120, elem_id="run")
        stop = gr.Button("Stop", variant="stop", scale=1, min_width=80, interactive=False, elem_id="stop")
    return {"run": run, "stop_button": stop}


def slider(*arguments, **options) -> gr.Slider:
    """A slider that hands on whatever was typed: what cannot be used is answered with a sentence, not with a 500."""
    return gr.Slider(*arguments, **options)


# on the class, since Gradio makes a new slider of one that an update changes
gr.Slider.preprocess = lambda self, payload: payload


def cutoff_slider(layers: int) -> gr.Slider:
    """How many layers read the prompt."""
    return slider(
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
    return slider(
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
    width = slider(
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
    try:
        pictures = tuple((path, Path(path).stat().st_mtime_ns) for path in read_images(images))
        return _prompt_tokens(weakref.ref(engine), text, chat, pictures, image_tokens or None)
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
