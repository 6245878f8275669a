"""The API as a stranger's program meets it: gradio_client against a server, pictures and wrong values included."""

import base64
import inspect
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from page_runs import collect, settings
from PIL import Image
from tiny_vision import scribble, seeing_folder

from pages import api, compare, comparing

pytestmark = pytest.mark.usefixtures("no_toasts")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> str:
    return str(seeing_folder(tmp_path_factory.mktemp("seeing"), "qwen3-vl"))


@pytest.fixture(scope="module")
def client():
    _, url, _ = compare.demo.queue().launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    yield Client(url, verbose=False)
    compare.demo.close()


def asked(client: Client, raw: dict) -> dict:
    return client.predict(**raw, api_name="/compare")


def odd_picture(folder: Path, kind: str) -> str:
    """A picture whose pixels depend on who opens it, unless one function does."""
    path, picture = folder / f"{kind}.png", scribble(48, 32)
    if kind == "turned":
        path, exif = folder / "turned.jpg", Image.Exif()
        exif[0x0112] = 8
        picture.save(path, exif=exif)
    elif kind == "see-through":
        picture.putalpha(Image.linear_gradient("L").resize(picture.size))
        picture.save(path)
    elif kind == "sixteen-bit":
        Image.fromarray(np.arange(48 * 32, dtype=np.uint16).reshape(32, 48) * 40).save(path)
    elif kind == "cmyk":
        path = folder / "cmyk.jpg"
        picture.convert("CMYK").save(path)
    return str(path)


@pytest.mark.parametrize("kind", ["turned", "see-through", "sixteen-bit", "cmyk"])
def test_the_same_picture_by_upload_and_by_api_is_the_same_prompt(client, seeing, tmp_path, kind):
    path = odd_picture(tmp_path, kind)
    page = collect(comparing.run(settings(seeing, images=[path]), {}, threading.Event(), "s"))["result"]
    uri = "data:image/any;base64," + base64.b64encode(Path(path).read_bytes()).decode()
    for image in (handle_file(path), uri):
        result = asked(client, settings(seeing, images=[image]))
        for name in ("dense", "pruned"):
            for key in ("pictures", "image_tokens", "prompt_tokens", "tokens", "text", "notices"):
                assert result[name][key] == page[name][key], key
        assert result["kl"] == page["kl"]
    assert page["dense"]["pictures"][0]["width"] == (32 if kind == "turned" else 48)


def test_pictures_may_be_left_out(client, seeing):
    raw = {key: value for key, value in settings(seeing).items() if key not in ("images", "image_tokens")}
    assert asked(client, raw)["dense"]["pictures"] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cutoff": "abc"}, "must be a whole number"),
        ({"cutoff": None}, "must be a whole number"),
        ({"cutoff": 1e9}, "this model has 6 layers"),
        ({"images": "/etc/passwd"}, "send handle_file"),
        ({"images": [{"path": "/etc/passwd"}]}, "was not uploaded"),
        ({"images": [[1]]}, "send handle_file"),
        ({"image_tokens": "many"}, "number of image tokens is 'many'"),
    ],
)
def test_wrong_values_are_one_sentence(client, seeing, change, sentence):
    with pytest.raises(AppError, match=sentence):
        asked(client, settings(seeing) | change)


def test_a_path_of_the_server_is_refused_however_it_is_dressed_up(client, seeing):
    """As one that Gradio marks as uploaded, so that it is Gradio that looks at it first."""
    dressed = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    answer = posted(client, settings(seeing, images=[dressed]))
    assert "event: error" in answer and "root:" not in answer
    assert "event: complete" in posted(client, settings(seeing))


def posted(client: Client, raw: dict) -> str:
    """The server's answer to plain HTTP."""
    values = [raw[name] for name in inspect.signature(api.compare).parameters]
    started = httpx.post(f"{client.src}gradio_api/call/compare", json={"data": values}).json()
    return httpx.get(f"{client.src}gradio_api/call/compare/{started['event_id']}", timeout=60).text
