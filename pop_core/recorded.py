"""Results that were made earlier, kept in `assets/` with the command that made them: something to see at once."""

import json
from dataclasses import asdict
from pathlib import Path

from .families import DecoderSpec

RECORDED = Path(__file__).parent.parent / "assets" / "recorded"


def save(path: Path, result: dict, spec: DecoderSpec, command: str) -> None:
    """Write a result, the shape of its model and the command. Raises `ValueError` for NaN."""
    data = {"command": command, "spec": asdict(spec), "result": result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[dict, DecoderSpec, str]:
    """(result, the shape of its model, command)."""
    data = json.loads(path.read_text(encoding="utf-8"))
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in data["spec"].items()}
    spec = DecoderSpec(**fields)
    return data["result"], spec, data["command"]
