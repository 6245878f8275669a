"""A study's channels as Plotly figures: the layers' scores and regions, each token's candidates, how they overlap.

Takes `Study.to_dict()` (or a recorded one), imports no torch. Figures look like those of `plots.py`. What was not
measured is written out, and a figure without data is a sentence that says why.
"""

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .channel_findings import why_no_choice, why_no_map
from .channel_view import chance, channels, kept_bits, layers, mixtures, ranked, single, step_overlaps
from .findings import percent
from .log_scale import figures, log_range, ticks
from .plots import (
    DENSE_COLOUR,
    GRID_COLOUR,
    PRUNED_COLOUR,
    TEXT_COLOUR,
    axis_title,
    base_layout,
    escaped,
    sentence_figure,
)
from .token_findings import visible

SCALE = "Cividis"
RETAINED_COLOUR, GONE_COLOUR = DENSE_COLOUR, "rgba(128, 128, 128, 0.55)"
REGIONS = (("retained", RETAINED_COLOUR), ("candidates", PRUNED_COLOUR), ("pruned", GONE_COLOUR))
EMPTY_COLOUR = "rgba(128, 128, 128, 0.16)"
MOST_ROWS = 160  # of candidates that are drawn apart; with more, a row stands for several
SENTENCE_HEIGHT = 160  # of a figure that is only a sentence
ABOVE = 112  # pixels for the tokens over the candidates
TOKEN_WIDTH, LEAST_WIDTH, LEFT, RIGHT = 15, 560, 64, 16


def regions_figure(result: dict, height: int = 440) -> go.Figure:
    """Every layer's channels by rank, coloured by their score, under a strip of the three regions."""
    shown = [(at, layer) for at, layer in enumerate(layers(result)) if layer.get("profile")]
    if not shown:
        return sentence_figure(why_no_map(result), SENTENCE_HEIGHT)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.045, 0.955], vertical_spacing=0.015)
    low, high = log_range([100 * value for _, layer in shown for value in layer["profile"]])
    vals, texts = ticks(low, high)
    for at, layer in shown:
        bins = len(layer["profile"])
        figure.add_trace(
            go.Heatmap(
                x=[100 * (bin + 0.5) / bins for bin in range(bins)],
                y=[at],
                z=[[round(max(math.log10(100 * value), low), 3) if value > 0 else low for value in layer["profile"]]],
                customdata=[[figures(100 * value) for value in layer["profile"]]],
                hovertemplate=f"layer {at}, %{{x:.0f}}% down<br>score %{{customdata}}% of the highest<extra></extra>",
                coloraxis="coloraxis",
            ),
            row=2,
            col=1,
        )
    _add_regions(figure, shown)
    last = len(layers(result)) - 1
    ends = [0, 25, 50, 75, 100]
    figure.update_xaxes(
        range=[0, 100], showgrid=False, zeroline=False, tickangle=0, tickvals=ends, ticktext=[f"{end}%" for end in ends]
    )
    figure.update_xaxes(title=axis_title("channels of a layer, the highest score first", None), row=2, col=1)
    figure.update_yaxes(layer_axis(last + 1), title=axis_title("layer"), automargin=True, row=2, col=1)
    figure.update_yaxes(visible=False, range=[0, 1], row=1, col=1)
    figure.update_layout(
        base_layout(height),
        margin={"l": 8, "r": 24, "t": 116, "b": 48},
        coloraxis={
            "colorscale": SCALE, "cmin": low, "cmax": high,
            "colorbar": colour_bar("score, % of the layer's highest (log scale)", vals, texts, y=1.13),
        },
    )  # fmt: skip
    return figure


def _add_regions(figure: go.Figure, shown: list[tuple[int, dict]]) -> None:
    """The strip above the map with its labels, if all layers are split alike, and where the regions meet in each."""
    edges = {at: _edges(layer) for at, layer in shown}
    first, spans = edges[shown[0][0]], {(at - 0.5, at + 0.5): ends for at, ends in edges.items()}
    if all(ends == first for ends in edges.values()):
        spans = {(min(edges) - 0.5, max(edges) + 0.5): first}
        _add_strip(figure, shown[0][1], list(zip((0, *first), (*first, 100), strict=True)))
    for (top, bottom), ends in spans.items():
        for edge in {end for end in ends if 0 < end < 100}:  # one line where there is no band
            for colour, width, dash in (("#ffffff", 3, "solid"), ("#000000", 1.5, "dot")):
                line = {"color": colour, "width": width, "dash": dash}
                figure.add_shape(type="line", x0=edge, x1=edge, y0=top, y1=bottom, line=line, row=2, col=1)


def _add_strip(figure: go.Figure, layer: dict, spans: list[tuple[float, float]]) -> None:
    for (start, end), (_, colour) in zip(spans, REGIONS, strict=True):
        if end > start:
            box = {"x0": start, "x1": end, "y0": 0, "y1": 1, "fillcolor": colour, "line": {"width": 0}}
            figure.add_shape(type="rect", **box, row=1, col=1)
    _label_regions(figure, layer, spans)


def _edges(layer: dict) -> tuple[float, float]:
    """Where the candidates begin and end, in percent of the layer's channels."""
    start = 100 * layer["retained"] / channels(layer)
    return start, start + 100 * layer["candidates"] / channels(layer)


def _label_regions(figure: go.Figure, layer: dict, spans: list[tuple[float, float]]) -> None:
    """Retained on the left, pruned on the right, the candidates a line higher, so that no two labels can collide."""
    places = {"retained": (0, "left", 2), "candidates": (sum(spans[1]) / 2, "center", 18), "pruned": (100, "right", 2)}
    for name, colour in REGIONS:
        share = layer[name] / channels(layer)
        if not share:
            continue
        x, anchor, shift = places[name]
        if name == "candidates" and not 20 < x < 80:
            x, anchor = (0, "left") if x <= 20 else (100, "right")
        figure.add_annotation(
            text=f'<span style="color:{colour}">■</span> {name} {percent(share)}', x=x, y=1, xref="x", yref="y domain",
            xanchor=anchor, yanchor="bottom", yshift=shift, showarrow=False, font={"size": 12},
        )  # fmt: skip


def choices_figure(result: dict, layer: int, height: int = 700) -> go.Figure:
    """The candidates of one layer, token by token; beneath it how much of its choice each token has in common with the
    token before, by layer. As wide as its tokens need, so the page scrolls it sideways."""
    why = why_no_choice(result, layer)
    if why:
        return sentence_figure(why, SENTENCE_HEIGHT)
    entry, known = layers(result)[layer], layers(result)
    bits = kept_bits(entry)
    names, rows = _rows(entry, bits)
    pieces = result["pruned"]["pieces"][: len(bits)]
    tokens = list(range(1, len(bits) + 1))
    titles = (f"Candidates of layer {layer}, the most often kept first", "Kept again, by layer")
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.56, 0.44], vertical_spacing=0.13, subplot_titles=titles
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": TEXT_COLOUR})
    figure.add_trace(
        go.Heatmap(
            x=tokens, y=list(range(len(rows))), z=rows, zmin=0, zmax=1, showscale=False, xgap=1,
            colorscale=[[0, EMPTY_COLOUR], [1, PRUNED_COLOUR]], customdata=[[name] * len(tokens) for name in names],
            hovertemplate="token %{x}<br>%{customdata}: kept %{z:.0%}<extra></extra>",
        ),
        row=1,
        col=1,
    )  # fmt: skip
    overlaps = [step_overlaps(other) for other in known]
    grid = [row if row else [None] * len(tokens) for row in overlaps]
    figure.add_trace(
        go.Heatmap(
            x=tokens, y=list(range(len(grid))), z=[[v if v is None else round(v, 3) for v in row] for row in grid],
            zmin=0, zmax=1, colorscale=SCALE, xgap=1, hoverongaps=False,
            hovertemplate="token %{x}<br>layer %{y}: %{z:.0%} of the choice as before<extra></extra>",
            colorbar={
                "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 150, "x": 0, "xanchor": "left",
                "xpad": 0, "y": 0.435, "yanchor": "bottom", "ypad": 0, "outlinewidth": 0, "tickvals": [0, 0.5, 1],
                "ticktext": ["0%", "50%", "100%"], "tickfont": {"size": 10},
            },
        ),
        row=2,
        col=1,
    )  # fmt: skip
    figure.layout.annotations[0].update(yshift=ABOVE - 24)  # above the tokens
    figure.layout.annotations[1].update(xshift=170)  # beside its colour bar
    figure.update_xaxes(
        tickvals=tokens, ticktext=[escaped(visible(piece)) for piece in pieces], tickangle=-90, tickfont={"size": 11},
        range=[0.5, len(tokens) + 0.5], showgrid=False, zeroline=False,
    )  # fmt: skip
    figure.update_xaxes(side="top", showticklabels=True, row=1, col=1)
    figure.update_yaxes(range=[len(rows) - 0.5, -0.5], showgrid=False, zeroline=False, row=1, col=1)
    figure.update_yaxes(tickvals=[0, len(rows) - 1], ticktext=["1", str(entry["candidates"])], row=1, col=1)
    figure.update_yaxes(title=axis_title("rank", None), row=1, col=1)
    figure.update_yaxes(layer_axis(len(known)), title=axis_title("layer", None), row=2, col=1)
    width = max(LEAST_WIDTH, LEFT + TOKEN_WIDTH * len(tokens) + RIGHT)
    margin = {"l": LEFT, "r": RIGHT, "t": ABOVE, "b": 88}
    figure.update_layout(base_layout(height), width=width, autosize=False, margin=margin)
    return figure


def _rows(entry: dict, bits: list[list[int]]) -> tuple[list[str], list[list[float]]]:
    """(what each row is, the share of it that each token kept), of the candidates by how often they were kept."""
    order = ranked(bits)
    size = math.ceil(len(order) / MOST_ROWS)
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    names = [
        f"rank {size * at + 1}" if len(group) == 1 else f"ranks {size * at + 1} to {size * at + len(group)}"
        for at, group in enumerate(groups)
    ]
    return names, [[round(sum(token[c] for c in group) / len(group), 3) for token in bits] for group in groups]


def overlap_figure(result: dict, height: int = 320) -> go.Figure:
    """How much of one token's choice the next one shares, by layer: of the candidates, and of all channels."""
    known = layers(result)
    kept = {at: known[at]["overlap"] for at in single(result) if known[at]["overlap"] is not None}
    halves = {at: value for at, value in enumerate(result["top_half"]) if value is not None}
    if not kept and not halves:
        if mixtures(result) and not single(result):
            return sentence_figure(why_no_map(result), SENTENCE_HEIGHT)
        return sentence_figure("Not measured: no two tokens chose one after the other.", SENTENCE_HEIGHT)
    figure = go.Figure(layout=base_layout(height))
    expected = next((chance(known[at]) for at in kept if chance(known[at]) is not None), 0.5)
    _add_chance(figure, expected, "by chance")
    if halves and abs(expected - 0.5) > 0.01:
        _add_chance(figure, 0.5, "best half by chance")
    for name, values, colour, symbol in (
        ("candidates kept", kept, PRUNED_COLOUR, "circle"),
        ("best half of all channels", halves, DENSE_COLOUR, "diamond"),
    ):
        if values:
            figure.add_scatter(
                x=list(values), y=list(values.values()), mode="lines+markers", name=name,
                line={"color": colour, "width": 2}, marker={"size": 7 if len(known) <= 40 else 4, "symbol": symbol},
                hovertemplate=f"layer %{{x}}<br>{name}: %{{y:.0%}}<extra></extra>",
            )  # fmt: skip
    values = [*kept.values(), *halves.values(), expected, 0.5]
    low, high = max(0.0, min(values) - 0.08), min(1.0, max(values) + 0.08)
    figure.update_yaxes(
        range=[low, high], tickformat=".0%", gridcolor=GRID_COLOUR, zeroline=False, nticks=6, automargin=True,
        title=axis_title("kept at the next token"),
    )  # fmt: skip
    figure.update_xaxes(layer_axis(len(known), down=False), title=axis_title("layer", None))
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
    figure.update_layout(
        showlegend=True, legend=legend | {"itemclick": False, "itemdoubleclick": False},
        margin={"l": 8, "r": 16, "t": 56, "b": 48},
    )  # fmt: skip
    return figure


def _add_chance(figure: go.Figure, level: float, text: str) -> None:
    figure.add_hline(level, line={"color": TEXT_COLOUR, "width": 1.5, "dash": "dot"})
    figure.add_annotation(
        text=f"{text} {level:.0%}", x=1, xref="paper", xanchor="right", y=level, yanchor="top", showarrow=False,
        font={"size": 12},
    )  # fmt: skip


def colour_bar(title: str, vals, texts, y: float) -> dict:
    """Above a figure, as wide as it is."""
    marks = {} if vals is None else {"tickvals": vals, "ticktext": texts}
    return {
        "orientation": "h", "thickness": 10, "y": y, "yanchor": "bottom", "x": 0, "xanchor": "left", "len": 1,
        "xpad": 0, "ypad": 6, "outlinewidth": 0, "tickfont": {"size": 11},
        "title": {"text": title, "side": "top", "font": {"size": 12}}, **marks,
    }  # fmt: skip


def layer_axis(count: int, down: bool = True) -> dict:
    """An axis of layers, the first one on top."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if count <= 10 * step or step == 1000)
    ends = [count - 0.5, -0.5] if down else [-0.5, count - 0.5]
    return {
        "range": ends, "tickmode": "linear", "tick0": 0, "dtick": step, "tickangle": 0, "showgrid": False,
        "zeroline": False, "tickfont": {"size": 12},
    }  # fmt: skip
