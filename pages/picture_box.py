"""Pictures in front of a prompt: their box on a page, and what the model is given of them."""

import weakref
from functools import lru_cache
from pathlib import Path

import gradio as gr

from pop_core.errors import PopError
from pop_core.pictures import MOST_PICTURES, open_picture, thumbnail

from . import answers
from .shared import DEFAULT_MODEL, MODELS, explain, spec_of
from .turns import AT_ONCE


def picture_box(visible: bool | None = None) -> dict:
    """Components "images" and "seen" in a box, "picture_box". visible: None while the default model may have eyes."""
    # the box, since Gradio makes a new component of one that an update changes, and forgets how it reads its files
    with gr.Column(visible=may_see(DEFAULT_MODEL) if visible is None else visible) as box:
        images = gr.File(
            label="Pictures, in front of the prompt",
            file_count="multiple",
            file_types=["image"],
            height=120,
            elem_id="images",
        )
        # `open_picture` is the one that judges a file, by what is in it
        images.preprocess = lambda payload: [file.path for file in payload] if payload else None
        seen = gr.HTML(elem_classes="plain", elem_id="seen")
    return {"picture_box": box, "images": images, "seen": seen}


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
