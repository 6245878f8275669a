"""What the tables of the README share: a command run as a reader would run it, and its place in the README."""

import functools
import json
import subprocess
import sys

from running import ROOT

HELD_OUT = "assets/heldout/technical.txt"


def pop_core(*arguments: str) -> dict:
    """The JSON of one command."""
    command = [sys.executable, "-m", "pop_core", *arguments, "--json"]
    print("$", " ".join(["python", *command[1:]]), file=sys.stderr)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def quality(file: str, plan: str) -> dict:
    return pop_core("quality", "--text", file, *plan.split())


def replace(name: str, text: str) -> None:
    """Put `text` between the README's markers of that name."""
    readme = ROOT / "README.md"
    head, start, rest = readme.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition(f"<!-- /{name} -->")
    if not start or not end:
        raise SystemExit(f"README.md has no markers for '{name}'")
    readme.write_text(head + start + text + "\n" + end + tail, encoding="utf-8")
