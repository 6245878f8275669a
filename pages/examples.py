"""Example prompts: what there is, which one fits a model, and what choosing one puts into the controls."""

import json
from pathlib import Path

from .export import file

ASSETS = Path(__file__).parent.parent / "assets"


def load_examples() -> list[dict]:
    """The prompts of all pages, those of one kind together; the first one is the default.

    "model" and "images" (paths in assets/) are there where an example is of one model and begins with pictures.
    """
    entries = json.loads((ASSETS / "examples.json").read_text(encoding="utf-8"))
    kinds = list(dict.fromkeys(entry["kind"] for entry in entries))
    return sorted(entries, key=lambda entry: kinds.index(entry["kind"]))


def examples_of_models() -> list[dict]:
    """Those that come with a bundled model, in its folder."""
    found = []
    for path in sorted(ASSETS.glob("models/*/examples.json")):
        model = path.parent.name
        for entry in json.loads(path.read_text(encoding="utf-8")):
            entry = entry if isinstance(entry, dict) else {"prompt": entry}
            known = {"kind": f"For {model}", "title": f"{entry['prompt'][:40]}…"} | entry
            found.append(known | {"model": model})
    return found


def titles(examples: list[dict]) -> list[str]:
    """What a person chooses among."""
    return [f"{entry['kind'][:1].upper()}{entry['kind'][1:]} · {entry['title']}" for entry in examples]


def pictures(example: dict) -> list[str] | None:
    """The paths of an example's pictures, None where it has none: copies in a folder that Gradio serves from, wherever
    the app was started."""
    paths = [ASSETS / name for name in example.get("images", ())]
    return [file(path.name, path.read_bytes(), "examples") for path in paths] or None


def example_for(model, prompt, examples: list[dict], images=None) -> int | None:
    """Which example to offer for a model in place of one that was made for another; None: what is there stays.

    prompt, images: in the controls; only an example that is still as it was chosen is replaced.
    """
    names = [Path(path).name for path in images or ()]
    shown = next((entry for entry in examples if entry["prompt"] == prompt and _names(entry) == names), None)
    own = next((at for at, entry in enumerate(examples) if entry.get("model") == model), None)
    if shown is None or shown.get("model") == model or (own is None and "model" not in shown):
        return None
    return own or 0


def _names(example: dict) -> list[str]:
    return [Path(path).name for path in example.get("images", ())]
