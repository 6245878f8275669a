"""A comparison as HTML: the two panes, the number tiles, the facts. Every text of a model or a person is escaped."""

import difflib
import html
import re

from pop_core import channel_words, sentences
from pop_core.forecast import ChannelForecast

STOPS = {
    "end": "ended by itself",
    "stop": "reached a stop string",
    "length": "reached the length limit",
    "cancelled": "stopped",
}
FLAG = (
    '<span class="first-difference" role="img" title="The first token that differs" '
    'aria-label="first difference">▾</span>'
)


def panes(dense: dict | None, pruned: dict | None, layers: int | None = None, finished: bool = False) -> str:
    """Both answers side by side. finished: mark where they differ, and say how each ended."""
    other = {"dense": pruned, "pruned": dense}
    boxes = []
    for name, run in (("dense", dense), ("pruned", pruned)):
        if run is None:
            reads, body, foot = "", "", ""
        else:
            reads = _uses(run)
            body = marked(run, other[name]) if finished and other[name] else html.escape(run["text"])
            foot = _foot(run, finished)
        if finished and run and not run["text"]:
            body = '<span class="quiet">(an empty answer)</span>'
        caret = "" if finished else '<span class="caret" aria-hidden="true"></span>'
        boxes.append(
            f'<section class="pane {name}" aria-label="{name} answer"><header><h3>{name.capitalize()}</h3>'
            f"<span>{reads}</span></header>"
            f'<div class="answer" data-testid="{name}">{body}{caret}</div>'
            f"<footer>{foot}</footer></section>"
        )
    return f'<div class="panes">{"".join(boxes)}</div>'


def _uses(run: dict) -> str:
    """What of the model a run read and wrote with, as far as that is known."""
    kept = run["layers"] - run["skipped_layers"] - len(run.get("dropped_layers", ()))
    reads = f"{kept} of {run['layers']} layers read the prompt"
    return "&nbsp;· ".join(filter(None, (reads, channel_words.writes(run))))


def _foot(run: dict, finished: bool) -> str:
    written = sentences.count(run["new_tokens"], "token")
    return f"{written} · {STOPS[run['stop']]}" if finished else written


def marked(run: dict, other: dict) -> str:
    """The escaped text of `run` with the words that `other` has not highlighted, and a mark before the first token
    that differs."""
    text = run["text"]
    spans = differing_spans(text, other["text"])
    at = first_difference_at(run, other)
    pieces, position = [], 0
    for start, end in [*spans, (len(text), len(text))]:
        for stop, tag in ((start, "{}"), (end, "<mark>{}</mark>")):
            if at is not None and position <= at < stop:
                pieces += [tag.format(html.escape(text[position:at])) if at > position else "", FLAG]
                position, at = at, None
            if stop > position:
                pieces.append(tag.format(html.escape(text[position:stop])))
                position = stop
    if at is not None:  # the answer ended where the other one went on
        pieces.append(FLAG)
    return "".join(pieces)


def differing_spans(text: str, other: str) -> list[tuple[int, int]]:
    """Where `text` has words that `other` has not, as ascending (start, end) without surrounding space."""
    words = list(re.finditer(r"\S+", text))
    theirs = re.findall(r"\S+", other)
    matcher = difflib.SequenceMatcher(None, [w.group() for w in words], theirs, autojunk=False)
    blocks = [(a, b) for kind, a, b, _, _ in matcher.get_opcodes() if kind != "equal" and b > a]
    return [(words[a].start(), words[b - 1].end()) for a, b in blocks]


def first_difference_at(run: dict, other: dict) -> int | None:
    """The character at which the first differing token of `run` begins, None when no token differs."""
    pairs = zip(run["tokens"], other["tokens"], strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run["tokens"]), len(other["tokens"])))
    if index == len(run["tokens"]) == len(other["tokens"]):
        return None
    at = min(len("".join(run["pieces"][:index])), len(run["text"]))
    return at + len(run["text"][at:]) - len(run["text"][at:].lstrip())  # a token often begins with its space


def tiles(result: dict) -> str:
    """The four numbers that matter."""
    boxes = "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{value}</dd><dd class="quiet">{note}</dd></div>'
        for label, value, note in (map(html.escape, tile) for tile in sentences.tiles(result))
    )
    return f'<dl class="tiles">{boxes}</dl>'


def facts(result: dict) -> str:
    """What was run and on what, with the notices of the run."""
    notices = dict.fromkeys([*result["dense"]["notices"], *result["pruned"]["notices"]])
    return fact_list(sentences.facts(result), list(notices))


def fact_list(facts: list[tuple[str, str]], notices: list[str]) -> str:
    """(name, value) pairs in two columns, and sentences below."""
    rows = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts)
    said = "".join(f"<p>{html.escape(notice)}</p>" for notice in notices)
    return f'<dl class="facts">{rows}</dl>{said}'


def pictures(facts: list[dict]) -> str:
    """The pictures of a prompt as the model was given them, each with its size and its tokens. facts: as in
    `vision.Pixels.facts`, or what is known of that; "name" is shown too."""
    cards = []
    for at, fact in enumerate(facts, start=1):
        name = html.escape(f"Picture {at}" + (f", {fact['name']}" if "name" in fact else ""))
        source = html.escape(fact["thumbnail"])
        cards.append(
            f'<figure><img src="{source}" alt="{name}"><figcaption>{html.escape(sentences.picture_words(fact))}'
            "</figcaption></figure>"
        )
    return f'<div class="pictures">{"".join(cards)}</div>' if cards else ""


def status(text: str, kind: str = "busy", fraction: float | None = None) -> str:
    """One line about what is going on. kind: "busy", "done", "stopped", "recorded" or "error"."""
    bar = "" if fraction is None else f'<progress value="{fraction:.2f}"></progress>'
    words = f'<span class="dot"></span><span>{html.escape(text)}</span>'
    return f'<div class="status {kind}" role="status">{words}{bar}</div>'


def note(text: str, kind: str = "plain") -> str:
    """A sentence under a figure or a control."""
    return f'<p class="note {kind}">{html.escape(text)}</p>' if text else ""


def alert(text: str) -> str:
    """The sentence of an error, announced at once."""
    return f'<div class="alert" role="alert">{html.escape(text)}</div>' if text else ""


def strip(layers: int, kept: int, channels: ChannelForecast | None = None) -> str:
    """Which layers read the prompt and which write the answer, a cell each; a cell is as full as its layer's FFN."""
    label, pruned, share = f"{kept} of {layers} layers read the prompt, all {layers} write the answer", 0, 1.0
    if channels:
        pruned, share = channels.pruned_layers or layers, 1 - channels.ratio
        label += f", {pruned} of them with {channel_words.percent(share)} of their FFN channels"
    part = f'<i class="part" style="--share: {100 * share:.1f}%"></i>'
    rows = "".join(
        f'<span class="strip-name">{name}</span><span class="cells">{cells}</span>'
        for name, cells in (
            ("reads the prompt", "<i></i>" * kept + '<i class="skipped"></i>' * (layers - kept)),
            ("writes the answer", part * pruned + "<i></i>" * (layers - pruned)),
        )
    )
    return f'<div class="strip" role="img" aria-label="{label}">{rows}</div>'
