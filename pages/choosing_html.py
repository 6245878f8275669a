"""The HTML parts of the Channels page: tokens, methods, links. Every text of a model or a person is escaped."""

import html

from pop_core.channel_table import method_list as described
from pop_core.channel_view import pruning
from pop_core.plan import SUM
from pop_core.token_findings import visible

from .links import to_query

LINKED = ("ratio", "width", "rescore")


def pieces(result: dict) -> str:
    """Both answers token by token; one that the other answer does not have in its place is marked."""
    dense, pruned = result["dense"], result["pruned"]
    rows = []

    def differs(other: dict, at: int, token: int) -> bool:
        theirs = other["tokens"][at : at + 1]
        return theirs != [token] and bool(theirs or other["stop"] != "cancelled")

    for name, run, other in (("Dense", dense, pruned), ("Pruned", pruned, dense)):
        chips = "".join(
            f"<i{' class=differs' if differs(other, at, token) else ''}>{html.escape(visible(piece))}</i>"
            for at, (token, piece) in enumerate(zip(run["tokens"], run["pieces"], strict=True))
        )
        rows.append(f"<dt>{name}</dt><dd>{chips or 'no tokens'}</dd>")
    return f'<dl class="pieces">{"".join(rows)}</dl>'


def method_list(result: dict) -> str:
    """Every method of the figures by its full name, with what it does and where it comes from."""
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in described(result))
    return f'<dl class="methods">{rows}</dl>'


def link_here(result: dict) -> str:
    """An anchor that opens this page with these settings."""
    score = pruning(result)["score"]
    query = to_query(result["model"], _linked(result)) + (f"&score={score}" if score != SUM else "")
    query = html.escape(query)
    return f'<p class="note">Link to these settings: <a href="{query}">{query}</a></p>'


def link_to_compare(result: dict) -> str:
    """The way to the Compare page with the same channels, all layers reading, as a link that looks like a button."""
    query = html.escape(to_query(result["model"], {"cutoff": result["dense"]["layers"]} | _linked(result)))
    return f'<a class="go" id="use" href="./{query}">Compare with these channels</a>'


def _linked(result: dict) -> dict:
    return {key: pruning(result)[key] for key in LINKED}
