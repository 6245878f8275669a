"""A comparison to take along: the run as JSON, the program that repeats it, the link that sets the controls."""

import hashlib
import html
import json
import tempfile
from pathlib import Path

from pop_core.snippet import snippet

from .links import to_query

FOLDER = tempfile.TemporaryDirectory(prefix="pop-studio-")  # Gradio copies what it serves to its own cache


def exports(result: dict, session: str) -> dict:
    """The outputs "download", "code" and "link"."""
    cut = result["pruned"]["plan"]["prefill"]
    return {
        "download": json_file(result, session),
        "code": snippet(result),
        "link": link(result["dense"]["model"], cut),
    }


def json_file(result: dict, session: str) -> str:
    """The path of the run as JSON, one file a session. Raises `ValueError` rather than write NaN."""
    folder = Path(FOLDER.name) / hashlib.sha256(session.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    path = folder / "pop-studio-comparison.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    return str(path)


def link(model: str, cut: dict) -> str:
    """An anchor that opens the page with these settings."""
    query = html.escape(to_query(model, cut))
    return f'<p class="note">Link to these settings: <a href="{query}">{query}</a></p>'
