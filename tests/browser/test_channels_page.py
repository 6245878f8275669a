"""The Channels page in a real browser: what is there at once, a small study, Stop, mistakes, the way to Compare."""

import re

import pytest
from playwright.sync_api import expect

from .conftest import PATIENCE, run_and_wait


def open_page(tab, address, query="", **size):
    page = tab(f"{address}channels{query}", **size)
    page.wait_for_selector("#choices .heatmaplayer image", state="attached")
    return page


def fill(page, **values) -> None:
    for name, value in values.items():
        page.fill(f"#{name} input[type=number]", str(value))
        page.keyboard.press("Tab")


def small(page, tokens=4) -> None:
    """Settings that are done in seconds."""
    page.fill("#prompt textarea", "The sea was calm that night, and")
    page.uncheck("#peers input")
    if not page.locator("#max_new_tokens").is_visible():
        page.click("#advanced > button")
    fill(page, max_new_tokens=tokens)


def test_a_recorded_study_is_there_at_once(address, tab):
    page = open_page(tab, address)
    expect(page.locator("#status")).to_contain_text("Recorded with")
    for figure in ("regions", "choices", "overlap", "quality", "speed"):
        expect(page.locator(f"#{figure} .main-svg").first).to_be_attached()
        expect(page.locator(f"#{figure}_note")).to_contain_text(re.compile(r"\w+ .*\."))
    expect(page.locator("#mixture")).to_be_hidden()
    expect(page.locator("#ahead")).to_contain_text("845 of 1,536 stay, each token chooses 77 of 154 candidates, 537 go")


def test_a_small_study_and_the_same_channels_on_the_compare_page(address, tab):
    page = open_page(tab, address)
    small(page)
    fill(page, ratio=0.3, width=0.2)
    expect(page.locator("#ahead")).to_contain_text("154 of 308 candidates")
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done: your own study")
    expect(page.locator("#caption")).to_contain_text("prune ratio 30%, candidate width 20%")
    expect(page.locator("#panes .pruned footer")).to_contain_text("4 tokens")
    page.click("#use")
    expect(page.locator("#ratio input[type=number]")).to_have_value("0.3", timeout=30_000)
    assert "/channels" not in page.url


def test_the_layer_changes_the_candidates_that_are_drawn(address, tab):
    page = open_page(tab, address)
    fill(page, layer=3)
    expect(page.locator("#choices_note")).to_contain_text("In layer 3,")
    expect(page.locator("#choices")).to_contain_text("Candidates of layer 3")
    fill(page, layer=29)
    expect(page.locator("#choices_note")).to_contain_text("In layer 29,")


def test_the_candidates_scroll_to_the_last_token(address, tab):
    page = open_page(tab, address, width=390)
    scroll = "(map) => { map.scrollLeft = 1e6; return map.scrollLeft; }"
    assert page.locator("#sideways").evaluate(scroll) > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_stop_keeps_what_was_written(address, tab):
    page = open_page(tab, address)
    small(page, tokens=256)
    page.click("#run")
    expect(page.locator("#status")).to_contain_text(re.compile(r"token [1-9]"), timeout=PATIENCE)
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped: what was done until then", timeout=60_000)
    expect(page.locator("#speed")).to_contain_text("not timed")
    expect(page.locator("#run")).to_be_enabled()


def test_mistakes_are_sentences_and_nothing_is_lost(address, tab):
    page = open_page(tab, address)
    before = page.inner_text("#quality_note p")
    fill(page, width=0.9)
    expect(page.locator("#ahead")).to_contain_text("must be 0 to 0.8")
    run_and_wait(page)
    expect(page.locator("#alert")).to_contain_text("must be 0 to 0.8")
    fill(page, ratio=0)
    expect(page.locator("#ahead")).to_contain_text("nothing is pruned")
    run_and_wait(page)
    expect(page.locator("#alert")).to_contain_text("nothing is pruned")
    fill(page, ratio=0.4, width=0.1)
    page.fill("#prompt textarea", "")
    run_and_wait(page)
    expect(page.locator("#alert")).to_contain_text("The prompt is empty")
    assert page.inner_text("#quality_note p") == before


def test_a_link_sets_the_controls(address, tab):
    page = open_page(tab, address, "?model=smollm2&ratio=0.25&width=0.5&rescore=none&score=l2")
    expect(page.locator("#ratio input[type=number]")).to_have_value("0.25")
    expect(page.locator("#width input[type=number]")).to_have_value("0.5")
    expect(page.locator("#ahead")).to_contain_text("stay, the same for every token")


def test_the_tables_and_the_downloads(address, tab):
    page = open_page(tab, address)
    page.click("#numbers > button")
    expect(page.locator("#method_table")).to_contain_text("GRIFFIN")
    expect(page.locator("#layer_table")).to_contain_text("1,536")
    page.click("#export > button")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the layers as CSV").click()
    assert download.value.path().read_bytes().startswith(b"\xef\xbb\xbfmodel,layer,kind")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(address, tab, theme):
    page = open_page(tab, address, f"?__theme={theme}", width=390, height=844)
    for button in page.locator(".gradio-container button.label-wrap").all():
        button.click()
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
