"""Results to take along: files for downloading, and the link that sets the controls."""

import hashlib
import html
import json
import tempfile
import uuid
from pathlib import Path

from pop_core.snippet import snippet

from .links import to_query

FOLDER = tempfile.TemporaryDirectory(prefix="pop-studio-")  # Gradio copies what it serves to its own cache


def exports(result: dict, session: str) -> dict:
    """The outputs "download", "code" and "link" of a comparison."""
    plan = result["pruned"]["plan"]
    return {
        "download": json_file("pop-studio-comparison.json", result, session),
        "code": snippet(result),
        "link": link(result["dense"]["model"], (plan["prefill"] or {}) | (plan["channels"] or {})),
    }


def json_file(name: str, result: dict, session: str) -> str:
    """The path of a result as JSON. Raises `ValueError` rather than write NaN."""
    text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return file(name, text.encode(), session)


def file(name: str, content: bytes, session: str) -> str:
    """The path of a file of this content; of each name there is one a session."""
    folder = Path(FOLDER.name) / hashlib.sha256(session.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    path = folder / name
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    part.write_bytes(content)
    part.replace(path)  # somebody may be reading the one before
    return str(path)


def link(model: str, settings: dict) -> str:
    """An anchor that opens the page with these settings."""
    query = html.escape(to_query(model, settings))
    return f'<p class="note">Link to these settings: <a href="{query}">{query}</a></p>'
