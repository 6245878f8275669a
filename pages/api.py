"""The app's documented API: one endpoint with plain values in and plain data out."""

import base64
import binascii
import tempfile
import threading
from pathlib import Path

import gradio as gr
from gradio.utils import get_upload_folder

from pop_core.errors import PopError
from pop_core.plan import CANDIDATES, WIDTH

from . import comparing
from .picture_box import check_number_of_pictures
from .shared import DEFAULT_MODEL, explain

HOW = "send handle_file(path) of gradio_client, or a data URI (data:image/png;base64,...)"


def compare(
    prompt: str,
    model: str = DEFAULT_MODEL,
    cutoff: float = 20,
    kv: str = "fitted",
    sinks: float = 4,
    boundary: float = 16,
    ratio: float = 0,
    width: float = WIDTH,
    rescore: str = CANDIDATES,
    max_new_tokens: float = 64,
    temperature: float = 0,
    top_p: float = 1,
    top_k: float = 0,
    seed: float = 0,
    stop: str = "",
    style: str = "chat",
    repeats: float = 3,
    images: list[dict | str] | None = None,
    image_tokens: float = 0,
) -> dict:
    """Answer a prompt dense and pruned, and compare both.

    cutoff: layers that read the prompt. kv: "fitted" or "own"; where nothing is fitted yet the run uses "own", and
    says so in the pruned run's notices and plan. sinks, boundary: prompt tokens, the first and the last ones, that run
    every layer all the same. ratio: share of the FFN channels left out while writing; 0 leaves out none. width: share
    of the channels that each token chooses from anew. rescore: "candidates", "none" (a fixed mask) or "all". stop:
    strings that end the answer, one a line. style: "chat" or "plain". images: pictures in front of the prompt, for a
    model that sees, as a list of `gradio_client.handle_file(path)` or of data URIs (data:image/png;base64,...); paths
    of the server are refused. image_tokens: that each picture is scaled to, small ones up and large ones down; 0 for
    the model's own. Returns
    `Comparison.to_dict()`; fails with one sentence for values that cannot be used.
    """
    raw = {name: value for name, value in locals().items() if name in comparing.NAMES}
    try:
        with tempfile.TemporaryDirectory() as folder:
            raw["images"] = received(images, Path(folder))
            *_, last = comparing.perform(raw, threading.Event(), "api")
    except Exception as error:
        raise gr.Error(explain(error), print_exception=False) from None
    return last["result"]


def received(images, folder: Path) -> list[str]:
    """The paths of pictures as a client sends them; those that come as text are written to `folder`. Raises `PopError`
    for any file that Gradio did not receive itself."""
    images = images if isinstance(images, (list, tuple)) else [] if images is None else [images]
    check_number_of_pictures(images)
    return [_received(image, folder / str(at)) for at, image in enumerate(images)]


def _received(image, file: Path) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        head, _, body = image.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError
            file.write_bytes(base64.b64decode(body, validate=True))
        except (ValueError, binascii.Error):
            raise PopError(f"A picture is a data URI that cannot be read; {HOW}.") from None
        return str(file)
    path = image.get("path") if isinstance(image, dict) else None
    if not path or not isinstance(path, str):
        raise PopError(f"A picture is {str(image)[:40]!r}; {HOW}.")
    try:
        inside = Path(path).resolve().is_relative_to(Path(get_upload_folder()).resolve())
    except (OSError, ValueError):  # a loop of links, a NUL
        inside = False
    if not inside:
        raise PopError(f"A picture was not uploaded; {HOW}.")
    return path
