"""The layer x token map as a Plotly figure. Takes `Importance.to_dict()` (or a recorded one), imports no torch."""

import plotly.graph_objects as go

from .heatmap import heat, layer_axis
from .importance_plots import WRITING_COLOUR
from .log_scale import log_range, number
from .plots import axis_title, base_layout, escaped, sentence_figure
from .token_findings import labels, token_totals

TOKEN_WIDTH, LEAST_WIDTH, TOKENS_LEFT, TOKENS_RIGHT = 15, 600, 56, 16
MOST_TOKENS = 512  # drawn: the last ones; the map of a large picture has more


def tokens_figure(result: dict, height: int = 460) -> go.Figure:
    """One sample's importance by token and layer. As wide as its tokens need, so the page scrolls it sideways."""
    shown = result["token_map"]
    late = max(0, len(shown["pieces"]) - MOST_TOKENS)
    values, names = [row[late:] for row in token_totals(shown)], labels(shown)[late:]
    first, boundary = shown["first"] + late, max(0, shown["boundary"] - late)
    if not names or not values:
        return sentence_figure("The map of this analysis is empty.", height)
    low, high = log_range([value for row in values for value in row])
    hovers = [[number(value) for value in row] for row in values]
    tokens, layers = [first + at for at in range(len(names))], list(range(len(values)))
    drawn = heat(values, hovers, low, high, x=tokens, y=layers)
    drawn.update(hovertemplate="token %{x}<br>layer %{y}: %{customdata}<extra></extra>", xgap=0, ygap=0)
    drawn.colorbar.update(lenmode="pixels", len=280, x=0, xanchor="left")
    figure = go.Figure(drawn, layout=base_layout(height))
    start = first + boundary - 0.5
    if 0 < boundary < len(names):
        figure.add_vline(start, line={"color": WRITING_COLOUR, "width": 2})
    if boundary:
        _add_side(figure, min(start, tokens[-1] + 0.5), "reads", "right")
    if boundary < len(names):
        _add_side(figure, start, "writes", "left")
    figure.update_xaxes(
        tickvals=tokens, ticktext=[escaped(name) for name in names], tickangle=-90, tickfont={"size": 11},
        range=[tokens[0] - 0.5, tokens[-1] + 0.5], showgrid=False, zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(layer_axis(len(layers)), title=axis_title("layer"), showgrid=False)
    width = max(LEAST_WIDTH, TOKENS_LEFT + TOKEN_WIDTH * len(names) + TOKENS_RIGHT)
    margin = {"l": TOKENS_LEFT, "r": TOKENS_RIGHT, "t": 72, "b": 96}
    figure.update_layout(width=width, autosize=False, margin=margin)
    return figure


def _add_side(figure: go.Figure, x: float, text: str, anchor: str) -> None:
    """A small label above the token map, on one side of where writing begins."""
    figure.add_annotation(
        text=text, x=x, y=1, xref="x", yref="paper", xanchor=anchor, yanchor="bottom", showarrow=False,
        font={"size": 12}, xshift=-4 if anchor == "right" else 4,
    )  # fmt: skip
