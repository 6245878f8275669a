"""The Importance page in a real browser: what is there at once, a small analysis, the way to Compare, mistakes."""

import re

import pytest
from playwright.sync_api import expect

from .conftest import PATIENCE, run_and_wait


def open_page(tab, address, query="", **size):
    page = tab(f"{address}importance{query}", **size)
    page.wait_for_selector("#layers .heatmaplayer image", state="attached")
    return page


def small(page, samples=3, prompt=24, new=6) -> None:
    """Settings that are done in seconds."""
    for name, value in (("samples", samples), ("prompt_tokens", prompt), ("new_tokens", new)):
        page.fill(f"#{name} input", str(value))
        page.keyboard.press("Tab")


def cutoff_of(page) -> str:
    return re.search(r"cutoff (\d+)", page.inner_text("#use")).group(1)


def test_a_recorded_result_is_there_at_once(address, tab):
    page = open_page(tab, address)
    expect(page.locator("#status")).to_contain_text("Recorded with")
    expect(page.locator("#layers_note")).to_contain_text("of the reading importance")
    for figure in ("curve", "ablation", "tokens"):
        expect(page.locator(f"#{figure} .main-svg").first).to_be_attached()
    expect(page.locator("#ablation_note")).to_contain_text("Spearman")


def test_a_small_analysis_and_its_cutoff_on_the_compare_page(address, tab):
    page = open_page(tab, address)
    small(page)
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done: your own analysis")
    expect(page.locator("#layers .heatmaplayer image").first).to_be_attached()
    cutoff = cutoff_of(page)
    page.click("#use")
    expect(page.locator("#cutoff input[type=number]")).to_have_value(cutoff, timeout=30_000)
    assert "/importance" not in page.url
    expect(page.locator("#status")).to_contain_text(f"Set by a link: cutoff {cutoff} of smollm2")


def test_the_token_map_scrolls_to_its_end(address, tab):
    for width in (1280, 390):
        page = open_page(tab, address, width=width)
        page.wait_for_selector("#tokens .heatmaplayer image", state="attached")
        scroll = "(map) => { map.scrollLeft = 1e6; return map.scrollLeft; }"
        assert page.locator("#sideways").evaluate(scroll) > 300
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_tolerance_moves_the_cutoff(address, tab):
    page = open_page(tab, address)
    page.fill("#tolerance input[type=number]", "0")
    page.keyboard.press("Tab")
    expect(page.locator("#use")).to_contain_text("cutoff 29")  # lossless: nothing of the last layer is ever read
    page.fill("#tolerance input[type=number]", "50")
    page.keyboard.press("Tab")
    expect(page.locator("#use")).not_to_contain_text("cutoff 29")
    assert int(cutoff_of(page)) < 15
    page.fill("#tolerance input[type=number]", "")
    page.keyboard.press("Tab")
    expect(page.locator("#tolerance input[type=number]")).to_have_value("0")  # what Gradio makes of nothing
    expect(page.locator("#use")).to_contain_text("cutoff 29")
    expect(page.locator("#alert")).not_to_contain_text("rror")


def test_stop_keeps_the_samples_that_are_done(address, tab):
    page = open_page(tab, address)
    small(page, samples=400)
    page.click("#run")
    expect(page.locator("#status")).to_contain_text(re.compile(r"\b[2-9] of 400"), timeout=PATIENCE)
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped: the result is that of", timeout=60_000)
    expect(page.locator("#run")).to_be_enabled()


def test_mistakes_are_sentences_and_nothing_is_lost(address, tab):
    page = open_page(tab, address)
    before = page.inner_text("#layers_note p")
    page.click("#source input")
    page.get_by_role("option", name="My own text").click()
    page.fill("#own textarea", "too short")
    run_and_wait(page)
    expect(page.locator("#alert")).to_contain_text("The text has 2 tokens")
    small(page, samples=0)
    expect(page.locator("#ahead")).to_contain_text("must be between 1 and 500")
    run_and_wait(page)
    expect(page.locator("#alert")).to_contain_text("must be between 1 and 500")
    assert page.input_value("#own textarea") == "too short"
    assert page.inner_text("#layers_note p") == before


def test_another_recorded_model_and_a_link_to_it(address, tab):
    page = open_page(tab, address, "?model=gemma3-270m")
    expect(page.locator("#status")).to_contain_text("--model gemma3-270m")
    expect(page.locator("#use")).to_have_attribute("href", re.compile("model=gemma3-270m"))
    page.click("#use")
    expect(page.locator("#cutoff input[type=range]")).to_have_attribute("max", "18", timeout=30_000)
    expect(page.locator("#forecast")).to_contain_text("of 18 layers for the prompt")


def test_the_table_and_the_downloads(address, tab):
    page = open_page(tab, address)
    page.click("#numbers > button")
    expect(page.locator("#table")).to_contain_text("Reading")
    page.click("#export > button")
    page.click("#make_report")
    expect(page.locator("#report")).to_be_visible(timeout=30_000)
    with page.expect_download() as download:
        page.click("#report")
    text = download.value.path().read_text(encoding="utf-8")
    assert "<html" in text and "Plotly.newPlot" in text
    page.fill("#tolerance input[type=number]", "20")
    page.keyboard.press("Tab")
    expect(page.locator("#report")).to_be_hidden()  # it was made for another tolerance


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(address, tab, theme):
    page = open_page(tab, address, f"?__theme={theme}", width=390, height=844)
    for button in page.locator(".gradio-container button.label-wrap").all():
        button.click()
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_pictures_are_analysed_and_the_map_lies_over_them(address, tab):
    page = open_page(tab, address, "?model=shapes-vl")
    expect(page.locator("#source input")).to_have_value("Generated pictures with questions")
    expect(page.locator("#prompt_tokens")).to_be_hidden()
    page.fill("#samples input", "3")
    page.keyboard.press("Tab")
    run_and_wait(page)
    expect(page.locator("#pictures img")).to_have_count(1)
    expect(page.locator("#pictures")).to_contain_text("36 tokens")
    expect(page.locator("#layers_note")).to_contain_text("Image tokens need")
    expect(page.locator("#overlay .layer-below image, #overlay .imagelayer image").first).to_be_attached()
    page.fill("#layer input[type=number]", "11")
    page.keyboard.press("Tab")
    expect(page.locator("#overlay_note")).to_contain_text("In layer 11 every image token's importance is exactly 0")
    page.fill("#tolerance input[type=number]", "50")
    page.keyboard.press("Tab")
    expect(page.locator("#layers_note")).to_contain_text("within the tolerance of 50%")
