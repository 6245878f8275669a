"""Make the example prompts with pictures.

`python scripts/example_pictures.py` draws assets/examples/*.png from held-out scenes, always the same ones, and puts
their questions at the end of assets/examples.json.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pop_core.scenes import held_out_questions, picture  # noqa: E402

ASSETS = ROOT / "assets"
MODEL, MOST_TOKENS = "shapes-vl", 32
CHOSEN = {  # kind of question -> title, number of the held-out scene; ones that the dense model answers rightly
    "describe": ("Describe it", 13),
    "colour": ("A colour", 5),
    "shape": ("A shape", 24),
    "place": ("A place", 4),
    "count": ("How many?", 15),
    "relation": ("What is below?", 0),
}


def examples() -> list[tuple[dict, object]]:
    """(entry of examples.json, its scene) of each."""
    scenes, found = list(held_out_questions(1 + max(number for _, number in CHOSEN.values()))), []
    for kind, (title, number) in CHOSEN.items():
        scene, asked = scenes[number]
        question = next(question for question in asked if question.kind == kind)
        entry = {"title": title, "kind": "picture", "model": MODEL, "images": [f"examples/{kind}.png"]}
        found.append((entry | {"prompt": question.text, "max_new_tokens": MOST_TOKENS}, scene))
    return found


def main() -> None:
    """Draw the pictures, rewrite the entries."""
    path = ASSETS / "examples.json"
    entries = [entry for entry in json.loads(path.read_text(encoding="utf-8")) if "images" not in entry]
    for entry, scene in examples():
        file = ASSETS / entry["images"][0]
        file.parent.mkdir(exist_ok=True)
        picture(scene).save(file, optimize=True)
        entries.append(entry)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes, {entry['prompt']}")
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
