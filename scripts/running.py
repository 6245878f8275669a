"""The app in a process of its own, and how Chromium is started: for browser tests, pictures and measurements."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
START_SECONDS = 120


@contextmanager
def running_app() -> Iterator[str]:
    """`app.py` on a free port; yields its address once it answers. Raises `RuntimeError` if it never does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "app.py", "--port", str(port)], cwd=ROOT, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        _wait_for(address, server)
        yield address
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(address: str, server: subprocess.Popen) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError("app.py ended before it answered")
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"app.py did not answer within {START_SECONDS} seconds")
