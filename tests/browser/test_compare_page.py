"""The first page in a real browser: what a visitor sees, runs, stops and gets wrong."""

import gradio as gr
import pytest
from playwright.sync_api import expect

from pages import answers

from .conftest import PATIENCE, run_and_wait

NASTY = "<script>alert(1)</script><b>bold</b> a<b ${alert(2)} <img src=x onerror=alert(3)> {{ }} `"


def set_number(page, name: str, value) -> None:
    """Fill a number of the Advanced section."""
    if not page.locator(f"#{name} input[type=number]").is_visible():
        page.click("#advanced > button")
    page.fill(f"#{name} input[type=number]", str(value))
    page.keyboard.press("Tab")


def test_a_recorded_comparison_is_there_at_once(address, tab):
    page = tab(address)
    expect(page.locator("#status")).to_contain_text("Recorded on", timeout=15_000)
    for name in ("dense", "pruned"):
        assert page.inner_text(f"[data-testid={name}]").strip()
    expect(page.locator("#figure .bars path").first).to_be_attached(timeout=30_000)
    expect(page.locator("#tiles")).to_contain_text("predicted")
    expect(page.locator("#timing")).to_contain_text("arithmetic alone predicts")


def test_the_default_comparison_runs(address, tab):
    page = tab(address)
    set_number(page, "max_new_tokens", 12)
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done")
    dense, pruned = (page.inner_text(f"[data-testid={name}]") for name in ("dense", "pruned"))
    assert len(dense.split()) > 3 and len(pruned.split()) > 3
    expect(page.locator("#figure")).to_contain_text("Dense · ")
    expect(page.locator("#figure")).to_contain_text(" ms")
    expect(page.locator("#timing")).to_contain_text("first token after")
    expect(page.locator(".pane.pruned header")).to_contain_text("20 of 30 layers")
    expect(page.locator("#run")).to_be_enabled()


def test_stop_keeps_what_was_written(address, tab):
    page = tab(address)
    page.fill("#prompt textarea", "Tell me a long story about a lighthouse and a storm.")
    set_number(page, "max_new_tokens", 2000)
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("Writing, token", timeout=PATIENCE)
    page.wait_for_function("document.querySelector('[data-testid=dense]').innerText.length > 20", timeout=PATIENCE)
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped: what was done", timeout=60_000)
    assert len(page.inner_text("[data-testid=dense]")) > 20
    expect(page.locator(".pane.dense footer")).to_contain_text("stopped")
    expect(page.locator("#run")).to_be_enabled()


@pytest.mark.parametrize("cutoff", [20, 30])
def test_channels_are_left_out_while_writing(address, tab, cutoff):
    page = tab(address)
    expect(page.locator("#forecast")).to_contain_text("All FFN channels write")
    set_number(page, "cutoff", cutoff)
    set_number(page, "ratio", 0.4)
    expect(page.locator("#forecast")).to_contain_text("845 of 1,536 stay, each token chooses 77 of 154 candidates")
    set_number(page, "max_new_tokens", 12)
    run_and_wait(page)
    expect(page.locator("#status")).to_contain_text("Done")
    expect(page.locator(".pane.pruned header")).to_contain_text(
        f"{cutoff} of 30 layers read the prompt · 60% of the FFN channels write"
    )
    expect(page.locator(".pane.dense header")).not_to_contain_text("FFN")
    expect(page.locator("#tiles")).to_contain_text("Writing speed-up")
    expect(page.locator("#timing")).to_contain_text("into slicing them")


def test_a_width_that_does_not_fit_is_told_there_and_then(address, tab):
    page = tab(address)
    before = page.inner_text("[data-testid=pruned]")
    set_number(page, "ratio", 0.2)
    set_number(page, "width", 0.9)
    expect(page.locator("#forecast .problem")).to_contain_text("at a prune ratio of 0.2 it must be 0 to 0.4")
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("at a prune ratio of 0.2 it must be 0 to 0.4")
    assert page.inner_text("[data-testid=pruned]") == before
    set_number(page, "width", 0.4)
    expect(page.locator("#forecast")).to_contain_text("each token chooses")


def test_mistakes_are_sentences_and_nothing_is_lost(address, tab):
    page = tab(address)
    before = page.inner_text("[data-testid=dense]")
    page.fill("#prompt textarea", "   ")
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("The prompt is empty")
    page.fill("#prompt textarea", "Why is the sky blue?")
    set_number(page, "boundary", -3)
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("must not be negative")
    set_number(page, "boundary", 16)
    set_number(page, "max_new_tokens", 100000)
    page.click("#run")
    expect(page.locator("#alert")).to_contain_text("fit this model's context")
    assert page.input_value("#prompt textarea") == "Why is the sky blue?"
    assert page.inner_text("[data-testid=dense]") == before


def test_an_unknown_model_is_named_literally(address, tab):
    page = tab(address)
    page.fill("#model input", "<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    expect(page.locator("#alert")).to_contain_text("<img src=x onerror=alert(1)>", timeout=PATIENCE)


def test_the_slider_says_what_it_does(address, tab):
    page = tab(address)
    expect(page.locator("#forecast")).to_contain_text("Skips 10 of 30 layers for the prompt")
    page.fill("#cutoff input[type=number]", "15")
    page.keyboard.press("Tab")
    expect(page.locator("#forecast")).to_contain_text(
        "Skips 15 of 30 layers for the prompt, keeps all 30 for the answer"
    )
    expect(page.locator("#forecast .skipped")).to_have_count(15)


def test_an_example_fills_the_prompt(address, tab):
    page = tab(address)
    page.click("#example input")
    page.get_by_role("option", name="Short · Why is the sky blue?").click()
    expect(page.locator("#prompt textarea")).to_have_value("Why is the sky blue?")


def test_a_link_sets_the_controls(address, tab):
    page = tab(f"{address}?model=smollm2&cutoff=12&kv=own&sinks=2&boundary=3")
    expect(page.locator("#cutoff input[type=number]")).to_have_value("12")
    expect(page.locator("#forecast")).to_contain_text("Skips 18 of 30")
    expect(page.locator("#ratio input[type=number]")).to_have_value("0")
    page = tab(f"{address}?ratio=0.95&width=0.06&rescore=none")
    expect(page.locator("#ratio input[type=number]")).to_have_value("0.95")
    expect(page.locator("#forecast")).to_contain_text("77 of 1,536 stay, the same for every token")
    page = tab(f"{address}?cutoff=99&kv=<b>")
    expect(page.locator("#alert")).to_contain_text("must be 'own' or 'fitted'")
    expect(page.locator("#alert")).to_contain_text("has 30 layers")
    expect(page.locator("#cutoff input[type=number]")).to_have_value("20")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(address, tab, theme):
    page = tab(f"{address}?__theme={theme}", width=390, height=844)
    page.wait_for_selector("#figure .bars path", state="attached")
    for button in page.locator(".gradio-container button.label-wrap").all():
        button.click()
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert ("dark" in page.evaluate("document.body.className")) == (theme == "dark")


def test_text_is_shown_literally(tab):
    """Model text cannot be chosen, so the panes are shown on a page of their own."""
    run = {
        "text": NASTY,
        "pieces": [NASTY],
        "tokens": [1],
        "stop": "end",
        "layers": 2,
        "skipped_layers": 1,
        "new_tokens": 1,
    }
    other = run | {"text": NASTY + " more", "pieces": [NASTY, " more"], "tokens": [1, 2]}
    with gr.Blocks() as demo:
        gr.HTML(answers.panes(run, other, finished=True))
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        page = tab(url)
        expect(page.locator("[data-testid=pruned]")).to_contain_text(NASTY)
        page.wait_for_timeout(300)  # a script would have opened its dialog by now
    finally:
        demo.close()
