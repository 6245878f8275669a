"""POP Studio: assembles the pages and launches them; nothing else.

`python app.py [--host H] [--port N]`; the environment variables GRADIO_SERVER_NAME and GRADIO_SERVER_PORT work too.
"""

import argparse
import os
import signal
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", help="the address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help="the port (default: 7860 or the next free one)")
    parser.add_argument("--share", action="store_true", help="open a public link through Gradio's relay")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = options()  # before the imports, so that --help is quick

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

from pages import channels, export, importance, shared  # noqa: E402
from pages.compare import demo  # noqa: E402
from pages.theme import THEME  # noqa: E402

with demo.route("Importance", "/importance"):
    importance.demo.render()
with demo.route("Channels", "/channels"):
    channels.demo.render()
demo.queue(max_size=20)


def terminated(*_) -> None:
    """Take the exported files along; at once, since model threads may be deep inside a library."""
    export.FOLDER.cleanup()
    os._exit(0)


def main(chosen: argparse.Namespace) -> None:
    """Answer at once; have the default model ready soon after."""
    signal.signal(signal.SIGTERM, terminated)
    demo.launch(
        server_name=chosen.host,
        server_port=chosen.port,
        share=chosen.share,
        theme=THEME,
        css_paths=ASSETS / "style.css",
        max_file_size="50mb",
        ssr_mode=False,
        run_history=False,
        footer_links=["api", "settings"],
        prevent_thread_lock=True,
    )
    shared.load_in_background()
    demo.block_thread()


if __name__ == "__main__":
    main(OPTIONS)
