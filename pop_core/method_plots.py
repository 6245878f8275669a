"""Methods that leave out as much, side by side as bars: how close each is to dense, and how fast it writes.

Takes `Study.to_dict()` (or a recorded one), imports no torch. Both figures have the methods in the same order: the
dense model on top, then ours, then the others by their divergence. A bar's own name says its value, so that no label
can collide with a whisker, and what was not measured has no bar.
"""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .channel_plots import SENTENCE_HEIGHT
from .channel_view import DENSE, OURS, row
from .findings import plain
from .method_findings import quality_sentence, speed_sentence
from .plots import DENSE_COLOUR, GRID_COLOUR, PRUNED_COLOUR, TEXT_COLOUR, base_layout, escaped, sentence_figure
from .sentences import milliseconds

COLOURS = {DENSE: DENSE_COLOUR, OURS: PRUNED_COLOUR}
OTHERS = "rgba(128, 128, 128, 0.6)"
MOST_SPREAD = 2  # times the slowest method's median; a whisker beyond that runs out of the picture
ROW_HEIGHT, FRAME = 25, 64  # pixels of a bar, and around the bars of a panel


def quality_figure(result: dict) -> go.Figure:
    """KL from dense and agreement with it, along the dense answer."""
    if all(entry["kl"] is None for entry in result["methods"]):
        return sentence_figure(quality_sentence(result), SENTENCE_HEIGHT)
    figure = _panels(result, ("KL, nats a token", "Same best token"))
    for at, key in enumerate(("kl", "agreement"), start=1):
        _add_bars(figure, result, key, _closeness, at)
    figure.update_xaxes(rangemode="tozero", nticks=5, row=1, col=1)
    figure.update_xaxes(range=[0, 1], tickformat=".0%", nticks=5, row=2, col=1)
    return figure


def speed_figure(result: dict) -> go.Figure:
    """Time of a token with the fastest and slowest step as whiskers, and what is done once for a prompt."""
    timed = any(entry["step_ms"] is not None for entry in result["methods"])
    if not timed and all(entry["partition_ms"] is None for entry in result["methods"]):
        return sentence_figure(speed_sentence(result), SENTENCE_HEIGHT)
    figure = _panels(result, ("Time per token", "Once for the prompt"))
    for at, key in enumerate(("step_ms", "partition_ms"), start=1):
        _add_bars(figure, result, key, _time, at)
    figure.update_xaxes(rangemode="tozero", ticksuffix=" ms", nticks=3)
    dense = row(result, DENSE)
    if not timed:
        figure.update_xaxes(range=[0, 1], showticklabels=False, row=1, col=1)
    if dense["step_ms"] is not None:
        line = {"color": DENSE_COLOUR, "width": 1.5, "dash": "dot"}
        figure.add_vline(dense["step_ms"], line=line, row=1, col=1)
        figure.update_xaxes(range=[0, _widest(result)], row=1, col=1)
    return figure


def ordered(result: dict) -> list[dict]:
    """The methods from the top down."""
    rest = [entry for entry in result["methods"] if entry["name"] not in (DENSE, OURS)]
    rest.sort(key=lambda entry: (entry["kl"] is None, entry["kl"] or 0))
    return [entry for name in (DENSE, OURS) for entry in [row(result, name)] if entry] + rest


def _closeness(entry: dict, value: float | None) -> str:
    if entry["name"] == DENSE:
        return "reference"
    return "not measured" if value is None else plain(value)


def _time(entry: dict, value: float | None) -> str:
    return milliseconds(value) if value or value is None else "nothing"


def _widest(result: dict) -> float:
    """Where the axis of times ends: at the slowest step, but for one that would make all bars tiny."""
    timed = [entry for entry in result["methods"] if entry["step_ms"] is not None]
    slowest = max(max(entry["step_spread"] or [entry["step_ms"]]) for entry in timed)
    return 1.05 * min(slowest, MOST_SPREAD * max(entry["step_ms"] for entry in timed))


def _panels(result: dict, titles: tuple[str, str]) -> go.Figure:
    height = 2 * (FRAME + ROW_HEIGHT * len(result["methods"]))
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=68 / height)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": TEXT_COLOUR})
    figure.update_layout(base_layout(height), bargap=0.28)
    figure.update_xaxes(gridcolor=GRID_COLOUR, zeroline=False, tickangle=0)
    figure.update_yaxes(showgrid=False, automargin=True, range=[len(result["methods"]) - 0.5, -0.5])
    return figure


def _add_bars(figure: go.Figure, result: dict, key: str, text, at: int) -> None:
    """One panel: a bar for each method that has a value. text: of (entry, value)."""
    entries = ordered(result)
    labels = [f"{escaped(entry['title'])} · {text(entry, entry[key])} " for entry in entries]
    if key == "agreement":
        labels = [
            label if entry[key] is None else f"{escaped(entry['title'])} · {entry[key]:.0%} "
            for entry, label in zip(entries, labels, strict=True)
        ]
    drawn = [(place, entry) for place, entry in enumerate(entries) if entry[key] is not None]
    whiskers = None
    if key == "step_ms":
        spreads = [entry["step_spread"] or [entry[key]] * 2 for _, entry in drawn]
        whiskers = {
            "type": "data", "symmetric": False, "color": TEXT_COLOUR, "thickness": 1.5, "width": 4,
            "array": [max(0.0, high - entry[key]) for (_, high), (_, entry) in zip(spreads, drawn, strict=True)],
            "arrayminus": [max(0.0, entry[key] - low) for (low, _), (_, entry) in zip(spreads, drawn, strict=True)],
        }  # fmt: skip
    figure.add_trace(
        go.Bar(
            x=[entry[key] for _, entry in drawn], y=[place for place, _ in drawn], orientation="h",
            marker={"color": [COLOURS.get(entry["name"], OTHERS) for _, entry in drawn]}, error_x=whiskers,
            customdata=[labels[place] for place, _ in drawn], hovertemplate="%{customdata}<extra></extra>",
        ),
        row=at,
        col=1,
    )  # fmt: skip
    figure.update_yaxes(tickvals=list(range(len(entries))), ticktext=labels, row=at, col=1)
