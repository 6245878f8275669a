"""Take pictures of the first page: `python scripts/screenshot.py` makes assets/screenshot.png for the README.

With `--all FOLDER` it makes one for each width and theme, to look at while working on the page.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@contextmanager
def app():
    """The app on a free port; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "app.py", "--port", str(port)], cwd=ROOT, env=dict(os.environ))
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(address, timeout=2).close()
                break
            except OSError:
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(10)


def picture(browser, address: str, path: Path, width: int, theme: str, height: int = 900) -> None:
    """One page as a PNG."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(f"{address}?__theme={theme}")
    page.wait_for_selector(".pane.pruned")
    page.wait_for_selector(".js-plotly-plot .bars")
    page.wait_for_timeout(1200)
    page.screenshot(path=path, full_page=True)
    page.close()


def main() -> None:
    """The README's picture, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", metavar="FOLDER", type=Path)
    parser.add_argument("--address", help="a running app, instead of a new one")
    chosen = parser.parse_args()
    with app() if not chosen.address else _given(chosen.address) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if not chosen.all:
            picture(browser, address, ROOT / "assets" / "screenshot.png", 1280, "light")
            return
        chosen.all.mkdir(parents=True, exist_ok=True)
        for width in (1280, 390):
            for theme in ("light", "dark"):
                picture(browser, address, chosen.all / f"{width}-{theme}.png", width, theme)


@contextmanager
def _given(address: str):
    yield address


if __name__ == "__main__":
    main()
