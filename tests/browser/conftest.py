"""A running app and a Chromium to look at it. Without Chromium the tests are skipped, but in CI that is a failure."""

import os

import pytest

from scripts.running import CHROMIUM, FLAGS, running_app

PATIENCE = 300_000  # milliseconds: a first run fetches the model, and the machine may be busy


@pytest.fixture(scope="session")
def address():
    """The app as a visitor meets it, in a process of its own; its address."""
    with running_app() as url:
        yield url


@pytest.fixture(scope="session")
def browser():
    if not CHROMIUM.exists():
        message = f"{CHROMIUM} is missing; install the package chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)


@pytest.fixture
def tab(browser):
    """A function that opens a page, which fails the test if a dialog opens or another host is asked."""
    tabs, wrong = [], []

    def open_tab(url: str, width: int = 1280, height: int = 900):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(60_000)
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _elsewhere(request.url) and wrong.append(request.url))
        page.goto(url)
        tabs.append(page)
        return page

    yield open_tab
    for page in tabs:
        page.close()
    assert not wrong


def _elsewhere(url: str) -> bool:
    return url.startswith(("http", "ws")) and "://127.0.0.1:" not in url


def run_and_wait(page) -> None:
    """Press Run and wait until it is done."""
    from playwright.sync_api import expect

    page.click("#run")
    expect(page.locator("#status .busy")).to_be_visible(timeout=5_000)
    expect(page.locator("#status .busy")).to_have_count(0, timeout=PATIENCE)
