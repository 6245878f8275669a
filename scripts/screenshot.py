"""Take pictures of the pages: `python scripts/screenshot.py` makes those in assets/ for the README.

With `--all FOLDER` it makes one of each page, width and theme, to look at while working on them.
"""

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright
from running import CHROMIUM, FLAGS, ROOT, running_app

# page -> its path, the README's picture of it, what must be there before it is taken
PAGES = {
    "compare": ("", "screenshot.png", ".js-plotly-plot .bars"),
    "importance": ("importance", "importance.png", "#tokens .heatmaplayer image"),
    "channels": ("channels", "channels.png", "#choices .heatmaplayer image"),
    "pictures": ("importance?model=shapes-vl", "pictures.png", "#overlay .heatmaplayer image"),
}


def picture(browser, address: str, page: str, file: Path, width: int, theme: str, height: int = 900) -> None:
    """One page as a PNG."""
    path, _, ready = PAGES[page]
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.goto(f"{address}{path}{'&' if '?' in path else '?'}__theme={theme}")
    tab.wait_for_selector(ready, state="attached")
    tab.wait_for_timeout(1500)
    tab.screenshot(path=file, full_page=True)
    tab.close()


def main() -> None:
    """The README's pictures, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", metavar="FOLDER", type=Path)
    chosen = parser.parse_args()
    with running_app() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        for page, (_, name, _) in PAGES.items():
            if not chosen.all:
                picture(browser, address, page, ROOT / "assets" / name, 1280, "light")
                continue
            chosen.all.mkdir(parents=True, exist_ok=True)
            for width in (1280, 390):
                for theme in ("light", "dark"):
                    picture(browser, address, page, chosen.all / f"{page}-{width}-{theme}.png", width, theme)


if __name__ == "__main__":
    main()
