"""Take pictures of the first page: `python scripts/screenshot.py` makes assets/screenshot.png for the README.

With `--all FOLDER` it makes one for each width and theme, to look at while working on the page.
"""

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright
from running import CHROMIUM, FLAGS, ROOT, running_app


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
    chosen = parser.parse_args()
    with running_app() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        if not chosen.all:
            picture(browser, address, ROOT / "assets" / "screenshot.png", 1280, "light")
            return
        chosen.all.mkdir(parents=True, exist_ok=True)
        for width in (1280, 390):
            for theme in ("light", "dark"):
                picture(browser, address, chosen.all / f"{width}-{theme}.png", width, theme)


if __name__ == "__main__":
    main()
