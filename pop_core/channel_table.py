"""A study as tables and CSV files: one by method, one by layer.

In a table a cell is text, a number, or None where nothing was measured: shown as "n/a", an empty cell of a file. The
names of the CSV's columns are those of the JSON.
"""

import csv
import io

from .channel_view import OURS, channels, described, is_mixture, layers, left_out, row
from .importance_table import UNMEASURED, neutral
from .method_plots import ordered
from .run import ratio

METHOD_NAMES = {
    "title": "Method",
    "removed_share": "Left out of the model",
    "kl": "KL, nats a token",
    "first_token_kl": "KL, first token",
    "agreement": "Same best token",
    "step_ms": "ms a token",
    "fastest_ms": "fastest",
    "slowest_ms": "slowest",
    "speedup": "Times dense",
    "partition_ms": "ms once a prompt",
}
LAYER_NAMES = {
    "layer": "Layer",
    "kind": "Kind",
    "channels": "Channels",
    "retained": "Retained",
    "candidates": "Candidates",
    "chosen": "Chosen by a token",
    "pruned": "Pruned",
    "left_out": "Left out of a token",
    "whole": "Whole FFNs",
    "overlap": "Kept at the next token",
    "top_half": "Best half kept",
}
SHARES = ("removed_share", "agreement", "left_out", "overlap", "top_half")


def method_rows(result: dict) -> list[dict]:
    """A row for each method, in the order of the figures."""
    dense, rows = row(result, "dense"), []
    for entry in ordered(result):
        fastest, slowest = entry["step_spread"] or (None, None)
        more = {"fastest_ms": fastest, "slowest_ms": slowest, "speedup": ratio(dense["step_ms"], entry["step_ms"])}
        rows.append({key: (entry | more)[key] for key in METHOD_NAMES})
    return rows


def layer_rows(result: dict) -> list[dict]:
    """A row for each layer of the pruned run."""
    rows = []
    for at, layer in enumerate(layers(result)):
        mixture = is_mixture(layer)
        kind = f"{len(layer['tokens'])} experts" if mixture else "one FFN"
        whole = len(layer["whole"]) if mixture else int(not layer["candidates"] and not layer["pruned"])
        known = {"layer": at, "kind": kind, "channels": channels(layer), "left_out": left_out(layer), "whole": whole}
        known |= {key: layer[key] for key in ("retained", "candidates", "chosen", "pruned", "overlap")}
        known["top_half"] = result["top_half"][at]
        rows.append({key: known[key] for key in LAYER_NAMES})
    return rows


def display(rows: list[dict], names: dict[str, str]) -> dict:
    """Headers and cells for a table of the page; no cell is blank."""
    return {
        "headers": list(names.values()),
        "data": [[_shown(key, value) for key, value in entry.items()] for entry in rows],
    }


def csv_bytes(result: dict, rows: list[dict], names: dict[str, str]) -> bytes:
    """Rows in full precision as a CSV file that spreadsheets open without taking text for formulas."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["model", *names])
    for entry in rows:
        writer.writerow([neutral(result["model"]), *(_written(value) for value in entry.values())])
    return text.getvalue().encode("utf-8-sig")


def method_list(result: dict) -> list[tuple[str, str]]:
    """(title, text) of every method: its full name, what it does and its source."""
    found = []
    for entry in ordered(result):
        full, does, source = described(entry, result)
        own = " This is the plan of this study." if entry["name"] == OURS else ""
        named = f"{full}. " if full != entry["title"] else ""
        found.append((entry["title"], f"{named}{does}{own}{f' Source: {source}.' if source else ''}"))
    return found


def _shown(key: str, value) -> str:
    if value is None:
        return UNMEASURED
    if isinstance(value, str):
        return value
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _written(value):
    return "" if value is None else neutral(value) if isinstance(value, str) else value
