"""Pictures on the pages, without a browser: uploads and API calls, errors as sentences, visitors that do not mix."""

import base64
import html
import itertools
import json
import sys
import threading
from pathlib import Path

import gradio as gr
import pytest
from page_runs import collect, settings
from PIL import Image
from tiny_vision import scribble, seeing_folder

from pages import answers, api, choosing, compare, comparing, picture_box, shared
from pop_core.errors import PopError
from pop_core.pictures import MOST_PICTURES
from pop_core.sentences import facts, picture_words, timing_sentence
from pop_core.snippet import snippet

pytestmark = pytest.mark.usefixtures("no_toasts")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> str:
    return str(seeing_folder(tmp_path_factory.mktemp("seeing"), "qwen3-vl"))


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Two pictures of different sizes: 8 and 4 tokens."""
    paths = [str(tmp_path / name) for name in ("wide.png", "square.png")]
    for path, size in zip(paths, ((32, 16), (16, 16)), strict=True):
        scribble(*size, seed=len(path)).save(path)
    return paths


def run(raw, previous=None, session="s", stop=None) -> dict:
    return collect(comparing.run(raw, previous or {}, stop or threading.Event(), session))


@pytest.fixture
def seen(seeing, files) -> dict:
    """What the page shows after a run with two pictures."""
    return run(settings(seeing, images=files))


def study(model: str, **changes) -> dict:
    """Settings of the Channels page."""
    values = (model, "what is this", 0.4, 0.4, "candidates", "sum", 4, False, 2, None)
    return dict(zip(choosing.NAMES, values, strict=True)) | changes


def test_a_run_shows_its_pictures_and_counts_them_apart(seen):
    dense, pruned = seen["result"]["dense"], seen["result"]["pruned"]
    assert "Done" in seen["status"] and dense["image_tokens"] == pruned["image_tokens"] == 12
    assert seen["pictures"].count("<img ") == 2 and "32 × 16 pixels, 8 tokens" in seen["pictures"]
    said = dict(facts(seen["result"]))
    assert said["Pictures"] == "2: 32 × 16 pixels, 8 tokens; 16 × 16 pixels, 4 tokens"
    assert said["Image tokens"] == f"12 of {dense['prompt_tokens']} prompt tokens"
    assert "of the first token's time" in said["Vision tower"] and "pruned" in said["Reading without vision"]
    assert "looked at the 2 pictures once for both" in timing_sentence(seen["result"])
    assert "Vision tower" in seen["facts"] and "data:image" not in seen["link"]


def test_the_times_before_the_first_token_add_up(seen):
    from pop_core.sentences import before_reading_ms, first_token_ms, tokenising_ms

    dense = seen["result"]["dense"]
    assert tokenising_ms(dense) + dense["vision_ms"] == pytest.approx(before_reading_ms(dense))
    assert first_token_ms(seen["result"], "dense") == pytest.approx(
        seen["result"]["dense_prefill_ms"] + before_reading_ms(dense)
    )


def test_without_pictures_nothing_speaks_of_them(result):
    shown = comparing.shown(result)
    assert shown["pictures"] == "" and "vision" not in (shown["facts"] + shown["timing"]).lower()
    old = json.loads(json.dumps(result))
    for name in ("dense", "pruned"):  # as it was recorded before there were pictures
        for key in ("pictures", "image_tokens", "vision_ms"):
            del old[name][key]
    again = comparing.shown(old)
    assert all(again[name] == shown[name] for name in ("pictures", "facts", "timing", "tiles", "panes"))
    assert "images" not in snippet(old)


def test_a_run_without_pictures_takes_those_of_the_one_before_away(seeing, seen):
    assert seen["pictures"] and run(settings(seeing), seen["result"])["pictures"] == ""


def test_what_is_taken_along_has_thumbnails_and_a_program_that_runs(seeing, seen, files, monkeypatch, capsys):
    saved = json.loads(Path(seen["download"]).read_text(encoding="utf-8"))
    assert saved["dense"]["pictures"][0]["thumbnail"].startswith("data:image/jpeg;base64,")
    assert 'f"picture-{number}.png" for number in range(1, 3)' in seen["code"] and "your own files" in seen["code"]
    for at, file in enumerate(files, start=1):
        Image.open(file).save(Path(file).with_name(f"picture-{at}.png"))
    monkeypatch.chdir(Path(files[0]).parent)
    exec(compile(seen["code"], "snippet", "exec"), {})  # our own program
    assert repr(seen["result"]["dense"]["text"])[1:-1] in repr(capsys.readouterr().out)
    one = run(settings(seeing, images=files[:1], image_tokens=4))
    assert 'images = ["picture-1.png"]' in one["code"] and "image_tokens=4" in one["code"]
    assert one["result"]["dense"]["image_tokens"] <= 4 and "were" not in one["alert"]
    assert "scaled to" in one["facts"]


def wrong_pictures(folder: Path) -> dict:
    """Files that are none."""
    made = {name: folder / name for name in ("text.png", "cut.png", "huge.png", "empty.png", "page.pdf")}
    made["text.png"].write_text("this is no picture")
    whole = folder / "whole.png"
    scribble(64, 64).save(whole)
    made["cut.png"].write_bytes(whole.read_bytes()[:2000])
    Image.new("1", (20_000, 20_000)).save(made["huge.png"])
    made["empty.png"].write_bytes(b"")
    made["page.pdf"].write_bytes(b"%PDF-1.7 and so on")
    return made


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("text.png", "not a picture that can be read"),
        ("cut.png", "damaged or cut off"),
        ("huge.png", "million pixels are accepted"),
        ("empty.png", "The file is empty"),
        ("page.pdf", "a PDF, not a picture"),
        ("gone.png", "no longer on the server"),
    ],
)
def test_a_picture_that_cannot_be_used_is_a_sentence_and_nothing_is_lost(
    seeing, files, tmp_path, capsys, name, sentence
):
    path = str(wrong_pictures(tmp_path).get(name, tmp_path / name))
    for shown in (
        run(settings(seeing, images=[files[0], path])),
        collect(choosing.run(study(seeing, images=[path]), {}, threading.Event(), "s")),
    ):
        assert sentence in html.unescape(shown["alert"]) and "Nothing was changed" in shown["status"]
        assert not {"panes", "result", "pictures", "prompt", "images"} & set(shown)
    assert capsys.readouterr().err.count(sentence) == 2
    said = picture_box.seen_pictures(seeing, [files[0], path])
    assert sentence in html.unescape(said) and "problem" in said
    assert said.count("<img ") == (name != "gone.png")  # the others are shown all the same


def test_too_many_pictures_and_what_is_no_file_are_sentences(seeing, files):
    for images, sentence in (
        ([files[0]] * (MOST_PICTURES + 1), "at most 64"),
        ([3], "must be an uploaded file"),
        ({"path": files[0]}, "must be an uploaded file"),
    ):
        assert sentence in html.unescape(run(settings(seeing, images=images))["alert"])
    assert (
        picture_box.read_images(files[0]) == files[:1]
        and picture_box.read_images(None) == picture_box.read_images([]) == []
    )


def test_a_model_without_eyes_says_so(tiny, files, capsys):
    for shown in (
        run(settings(tiny, images=files)),
        collect(choosing.run(study(tiny, images=files), {}, threading.Event(), "s")),
    ):
        assert "reads text only and cannot see a picture; use shapes-vl" in html.unescape(shown["alert"])
        assert not {"panes", "result"} & set(shown)
    assert capsys.readouterr().err.count("reads text only") == 2
    assert "smollm2 reads text only" in picture_box.seen_pictures("smollm2", files)
    box, _ = picture_box.picture_update("smollm2", files)
    assert box["visible"]  # so that they can be taken away
    assert not picture_box.picture_update("smollm2", None)[0]["visible"]
    assert picture_box.picture_update("owner/unknown", None)[0]["visible"]


def test_a_cutoff_below_deepstack_is_told_before_and_at_the_run(seeing, files):
    engine = shared.MODELS.get(seeing)
    least = engine.spec.deepstack
    ahead = ("what", "chat", least - 1, "own", 1, 2, 0, 0.1, "candidates")
    assert "DeepStack" in compare.looked_ahead(seeing, *ahead, files, None)
    assert "DeepStack" not in compare.looked_ahead(seeing, *ahead, None, None)
    assert "DeepStack" in run(settings(seeing, images=files, cutoff=least - 1))["alert"]
    assert run(settings(seeing, cutoff=least - 1))["result"]["complete"]


def test_the_forecast_counts_the_picture_exactly(seeing, files, seen):
    tokens = seen["result"]["dense"]["prompt_tokens"]
    ahead = ("what is this thing", "chat", 4, "own", 1, 2, 0, 0.1, "candidates")
    assert f"at {tokens} prompt tokens" in compare.looked_ahead(seeing, *ahead, files, None)
    assert "an assumed 512" in compare.looked_ahead(seeing, *ahead, [files[0], __file__], None)
    assert f"at {tokens} prompt" not in compare.looked_ahead(seeing, *ahead, files, 4)


def test_the_form_shows_what_the_model_is_given(seeing, files, tmp_path):
    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    scribble(64, 32).save(turned, exif=exif)
    before = picture_box.seen_pictures("owner/not-loaded", [str(turned)])
    assert "32 × 64 pixels" in before and "token" not in before  # upright; tokens are the model's
    shared.MODELS.get(seeing)
    after = picture_box.seen_pictures(seeing, [str(turned)])
    assert "32 × 64 pixels, 32 tokens" in after and 'alt="Picture 1, turned.jpg"' in after
    assert "scaled to" in picture_box.seen_pictures(seeing, [str(turned)], 4)
    assert picture_box.seen_pictures(seeing, None) == ""


def test_no_number_of_image_tokens_is_the_models_own(seeing, files, seen):
    for value in (0, None, ""):  # 0 is what an empty box of the page sends
        shown = run(settings(seeing, images=files, image_tokens=value))["result"]
        assert shown["dense"]["pictures"] == seen["result"]["dense"]["pictures"] and "most_image_tokens" not in shown
        assert picture_box.seen_pictures(seeing, files, value) == picture_box.seen_pictures(seeing, files)


def test_words_of_a_picture():
    fact = {"width": 3000, "height": 2000, "thumbnail": "data:image/jpeg;base64,AA"}
    assert picture_words(fact) == "3,000 × 2,000 pixels"
    fact |= {"seen_width": 96, "seen_height": 64, "tokens": 1}
    assert picture_words(fact) == "3,000 × 2,000 pixels, seen at 96 × 64, 1 token"
    assert "<b>" not in answers.pictures([fact | {"name": '"<b>.png'}]) and answers.pictures([]) == ""


def test_stop_keeps_what_there_is_of_a_run_with_pictures(seeing, files):
    stop, shown = threading.Event(), {}
    raw = settings(seeing, images=files, max_new_tokens=80, repeats=20)
    for update in comparing.run(raw, {}, stop, "s"):
        shown |= update
        if "panes" in update:
            assert shown["pictures"].count("<img ") == 2  # from the first words on
            stop.set()
    assert not shown["result"]["complete"] and "Stopped" in shown["status"] and shown["pictures"]
    assert run(settings(seeing, images=files))["result"]["complete"]


def test_a_failure_half_way_brings_the_pictures_of_before_back(seeing, seen, files, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(sys.modules["pop_core.compare"], "_result", broken)
    shown = run(settings(seeing, images=files[:1]), seen["result"])
    assert shown["pictures"] == seen["pictures"] and shown["result"] == seen["result"]


def test_two_visitors_with_different_pictures_do_not_mix(seeing, files):
    alone = [run(settings(seeing, images=[file], prompt=f"what {file[-8]}")) for file in files]
    pages = [
        comparing.run(settings(seeing, images=[file], prompt=f"what {file[-8]}"), {}, threading.Event(), file)
        for file in files
    ]
    shown = [{}, {}]
    for updates in itertools.zip_longest(*pages, fillvalue={}):  # both at once; the model takes them in turn
        for at, update in enumerate(updates):
            shown[at] |= update
    for one, other in zip(alone, shown, strict=True):
        assert other["pictures"] == one["pictures"]
        for name in ("dense", "pruned"):
            for key in ("tokens", "pictures", "image_tokens", "prompt_tokens", "text"):
                assert other["result"][name][key] == one["result"][name][key]
    assert shown[0]["pictures"] != shown[1]["pictures"]


def test_a_study_of_channels_takes_pictures(seeing, files):
    shown = collect(choosing.run(study(seeing, images=files), {}, threading.Event(), "s"))
    assert "Done" in shown["status"] and shown["pictures"].count("<img ") == 2
    assert shown["result"]["pruned"]["image_tokens"] == shown["result"]["dense"]["image_tokens"] == 12
    assert "Image tokens" in shown["facts"]
    assert collect(choosing.run(study(seeing), {}, threading.Event(), "s"))["pictures"] == ""


def data_uri(path: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def test_text_that_is_a_picture_gives_what_an_upload_gives(seeing, files, seen):
    result = api.compare(**settings(seeing, images=[data_uri(file) for file in files]))
    assert result["dense"]["pictures"] == seen["result"]["dense"]["pictures"]
    assert result["dense"]["tokens"] == seen["result"]["dense"]["tokens"]


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (["/etc/passwd"], "A picture is '/etc/passwd'; send handle_file"),
        ([{"path": "/etc/passwd"}], "A picture was not uploaded"),
        ([{"path": "/tmp/gradio/../../etc/passwd"}], "A picture was not uploaded"),
        ([{"path": "a\0b"}], "A picture was not uploaded"),
        ([{"path": None, "url": "http://127.0.0.1/x.png"}], "send handle_file"),
        (["https://example.com/x.png"], "A picture is 'https://example.com/x.png'; send handle_file"),
        ("data:image/png,abc", "cannot be read"),
        (["data:image/png;base64,%%%"], "cannot be read"),
        (["data:image/png;base64,aGVsbG8="], "not a picture that can be read"),
        ([7], "A picture is '7'"),
        ({"a": 1}, "A picture is"),
        (["data:,"] * 65, "at most 64"),
    ],
)
def test_the_api_opens_nothing_that_gradio_did_not_receive(seeing, capsys, images, sentence):
    with pytest.raises(gr.Error) as refused:
        api.compare(**settings(seeing, images=images))
    assert sentence in refused.value.message and "\n" not in refused.value.message
    assert sentence in capsys.readouterr().err


def test_links_out_of_the_upload_folder_are_not_followed(tmp_path, monkeypatch, files):
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    monkeypatch.setattr(api, "get_upload_folder", lambda: str(uploads))
    inside = uploads / "own.png"
    inside.write_bytes(Path(files[0]).read_bytes())
    (uploads / "link.png").symlink_to(files[0])
    assert api.received([{"path": str(inside)}], tmp_path) == [str(inside)]
    with pytest.raises(PopError, match="was not uploaded"):
        api.received([{"path": str(uploads / "link.png")}], tmp_path)


@pytest.mark.parametrize("value", [3, "abc", 10**6, 1.5])
def test_a_number_of_image_tokens_that_cannot_be(seeing, files, value):
    assert "number of image tokens" in run(settings(seeing, images=files, image_tokens=value))["alert"]
