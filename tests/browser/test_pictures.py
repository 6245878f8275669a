"""Pictures in a real browser: upload one, ask about it, see what the model was given and both answers."""

import io

import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import expect

from .conftest import PATIENCE, run_and_wait

PAGES = ("", "channels")


def drawing(width: int = 600, height: int = 400, kind: str = "PNG", **save) -> bytes:
    """A red circle on white, as a file."""
    picture, out = Image.new("RGB", (width, height), "white"), io.BytesIO()
    ImageDraw.Draw(picture).ellipse((width // 4, height // 4, width // 2, height // 2), fill=(214, 40, 40))
    picture.save(out, kind, **save)
    return out.getvalue()


def choose(page, name: str, option: str) -> None:
    page.click(f"#{name} input")
    page.get_by_role("option", name=option).click()


def pick_eyes(page) -> None:
    """Pick the model that sees, and wait until its first example is there."""
    choose(page, "model", "Shapes-VL, sees coloured shapes")
    expect(page.locator("#seen img")).to_have_count(1, timeout=PATIENCE)


def upload(page, *files: dict) -> None:
    """Put files in place of those that are there."""
    if page.locator("#images button[aria-label='Clear']").count():
        page.click("#images button[aria-label='Clear']")
        expect(page.locator("#seen img")).to_have_count(0)
    page.set_input_files("#images input[type=file]", list(files))


def test_an_uploaded_picture_is_asked_about(address, tab):
    page = tab(address)
    expect(page.locator("#images")).to_have_count(0)  # the default model reads text only
    pick_eyes(page)
    expect(page.locator("#status")).to_contain_text("shapes-vl is ready", timeout=PATIENCE)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    upload(page, {"name": "mine.jpg", "mimeType": "image/jpeg", "buffer": drawing(kind="JPEG", exif=exif)})
    expect(page.locator("#seen")).to_contain_text("400 × 600 pixels, seen at 64 × 112, 28 tokens")
    expect(page.locator("#seen img")).to_have_attribute("alt", "Picture 1, mine.jpg")
    page.fill("#prompt textarea", "how many things are there?")
    page.keyboard.press("Tab")
    expect(page.locator("#forecast")).to_contain_text("4 of 12 layers")
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done")
    for name in ("dense", "pruned"):
        assert page.inner_text(f"[data-testid={name}]").strip()
    expect(page.locator("#pictures")).to_contain_text("28 tokens")
    size = page.evaluate("(i => [i.naturalWidth, i.naturalHeight])(document.querySelector('#pictures img'))")
    assert size[0] < size[1]  # upright
    expect(page.locator("#timing")).to_contain_text("The vision tower looked at the picture once")
    page.get_by_role("button", name="Details of the run").click()
    expect(page.locator("#facts")).to_contain_text("Image tokens")
    expect(page.locator("#facts")).to_contain_text("28 of ")


def test_mistakes_with_pictures_are_sentences_and_nothing_is_lost(address, tab):
    page = tab(address)
    pick_eyes(page)
    expect(page.locator("#status")).to_contain_text("shapes-vl is ready", timeout=PATIENCE)
    before = page.inner_text("[data-testid=dense]")
    upload(page, {"name": "broken.png", "mimeType": "image/png", "buffer": drawing()[:300]})
    expect(page.locator("#seen .problem")).to_contain_text("broken.png: The PNG file is damaged or cut off")
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("damaged or cut off")
    assert page.inner_text("[data-testid=dense]") == before
    expect(page.locator("#prompt textarea")).to_have_value("describe the picture.")
    upload(page, {"name": "mine.png", "mimeType": "image/png", "buffer": drawing()})
    expect(page.locator("#seen img")).to_have_count(1)
    page.fill("#cutoff input[type=number]", "2")
    page.keyboard.press("Tab")
    expect(page.locator("#forecast .problem")).to_contain_text("with a picture it must be 3 to 12")
    choose(page, "model", "SmolLM2-135M-Instruct")
    expect(page.locator("#status")).to_contain_text("smollm2 is ready", timeout=PATIENCE)
    expect(page.locator("#seen .problem")).to_contain_text("smollm2 reads text only and cannot see a picture")
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("cannot see a picture; use shapes-vl", timeout=PATIENCE)
    page.click("#images button[aria-label='Clear']")  # still there, so that it can be taken away
    expect(page.locator("#images")).to_have_count(0)


def test_an_example_brings_its_picture_and_its_model_and_takes_them_away(address, tab):
    page = tab(address)
    for option, prompt in (
        ("Picture · A colour", "which colour has the cross?"),
        ("Picture · A place", "where is the cross?"),
    ):
        choose(page, "example", option)
        expect(page.locator("#seen img")).to_have_count(1)
        expect(page.locator("#model input")).to_have_value("Shapes-VL, sees coloured shapes · built in")
        expect(page.locator("#prompt textarea")).to_have_value(prompt)
        expect(page.locator("#status")).to_contain_text("shapes-vl is ready", timeout=PATIENCE)
    expect(page.locator("#cutoff input[type=number]")).to_have_value("8")
    choose(page, "example", "Short · Why is the sky blue?")
    expect(page.locator("#seen img")).to_have_count(0)
    expect(page.locator("#prompt textarea")).to_have_value("Why is the sky blue?")
    choose(page, "example", "Picture · A shape")
    expect(page.locator("#seen img")).to_have_count(1)
    choose(page, "model", "SmolLM2-135M-Instruct")
    expect(page.locator("#images")).to_have_count(0)
    expect(page.locator("#example input")).to_have_value("Document · The lighthouse at Carrow Point")
    expect(page.locator("#status")).to_contain_text("smollm2 is ready", timeout=PATIENCE)
    expect(page.locator("#cutoff input[type=number]")).to_have_value("20")


def test_channels_are_studied_after_a_picture(address, tab):
    page = tab(f"{address}channels")
    page.wait_for_selector(".js-plotly-plot .main-svg", state="attached")
    choose(page, "example", "Picture · How many?")
    expect(page.locator("#model input")).to_have_value("Shapes-VL, sees coloured shapes · built in")
    expect(page.locator("#seen img")).to_have_count(1)
    page.uncheck("#peers input")
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done")
    expect(page.locator("#pictures")).to_contain_text("36 tokens")
    expect(page.locator("#seen")).to_contain_text("36 tokens")  # now that the model is there


@pytest.mark.parametrize("path", PAGES)
def test_a_phone_needs_no_sideways_scrolling_with_pictures(address, tab, path):
    page = tab(f"{address}{path}", width=390, height=844)
    page.wait_for_selector(".js-plotly-plot .main-svg", state="attached")
    choose(page, "example", "Picture · Describe it")
    expect(page.locator("#seen img")).to_have_count(1, timeout=PATIENCE)
    wide = {"name": "a-very-long-name-of-a-wide-picture" * 3 + ".png", "mimeType": "image/png"}
    upload(page, *[wide | {"buffer": drawing(2000, 20 + at)} for at in range(3)])
    expect(page.locator("#seen img")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
