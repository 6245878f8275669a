"""An analysis to Plotly figures. Takes `Importance.to_dict()` (or a recorded one), imports no torch.

Figures have a transparent background, mid-grey text and a fixed height, like those of `plots.py`. Nothing becomes a
gap in silence: an exact 0 is written "0", a value that is not finite "NaN", and what was not measured as a sentence.
"""

import math

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from .findings import percent, why_no_shares
from .heatmap import SCALE, heat, layer_axis
from .importance import BRANCHES, KINDS, STAGES, has_kinds, ratios, skipped_share
from .log_scale import HIGHEST, figures, log_range, ticks
from .plots import GRID_COLOUR, TEXT_COLOUR, axis_title, base_layout, sentence_figure

READING_COLOUR, WRITING_COLOUR = "#009E73", "#D55E00"  # Okabe and Ito's, 3:1 on white and on dark, far apart for all
COLOURS = dict(zip(STAGES, (READING_COLOUR, WRITING_COLOUR), strict=True))
WORDS = dict(zip((*KINDS, *STAGES), ("Images", "Text", "Reading", "Writing"), strict=True))
GAP = 0.1  # between the heatmap and what is beneath it, as a share of the height
ROW_HEIGHT = 26  # pixels of a row of the heatmap that is there with pictures only
LEAST_SHARE = 0.1  # percent, the bottom of the curve


def layers_figure(result: dict, cutoff: int | None, height: int = 420) -> go.Figure:
    """Importance of every layer by stage and branch, and beneath it how much more it serves writing than reading. With
    pictures the reading of image tokens and of text tokens alone stand above, and the figure is higher."""
    layers = result["layers"]
    rows, more = rows_of(layers), ROW_HEIGHT * (len(rows_of(layers)) - 2 * len(STAGES))
    height, upper = height + more, (0.52 * height + more) / (height + more)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[upper, 1 - upper], vertical_spacing=GAP)
    values, low, high = _heat_rows(layers)
    hovers = [
        [_layer_hover(entry, stage, label, value) for entry, value in zip(layers, row, strict=True)]
        for (stage, _, label), row in zip(rows, values, strict=True)
    ]
    figure.add_trace(heat(values, hovers, low, high), 1, 1)
    for at, row in enumerate(values):
        for layer, value in enumerate(row):
            if not value:
                _write(figure, figures(value), layer, at, len(layers), row=1)
    _add_ratios(figure, ratios(layers))
    if cutoff is not None:
        between = GAP / 2 + (1 - GAP) * (1 - upper)
        _add_cutoff(figure, min(max(cutoff, 0), len(layers)) - 0.5, cutoff, len(layers), y=between, yanchor="middle")
    figure.update_xaxes(layer_axis(len(layers)))
    figure.add_annotation(  # an axis title is misplaced where another figure was drawn before
        text="layer", x=0.5, y=0, xref="paper", yref="paper", yanchor="top", yshift=-22, showarrow=False,
        font={"size": 13},
    )  # fmt: skip
    figure.update_yaxes(
        range=[len(rows) - 0.5, -0.5], tickvals=list(range(len(rows))), ticktext=[label for _, _, label in rows],
        showgrid=False, zeroline=False, automargin=True, row=1, col=1,
    )  # fmt: skip
    figure.update_layout(base_layout(height), margin={"l": 8, "r": 12, "t": 54, "b": 48})
    return figure


def curve_figure(result: dict, tolerance: float, cutoff: int | None, height: int = 300) -> go.Figure:
    """For every cutoff, how much of the prefill importance is skipped."""
    layers = result["layers"]
    shares, count = skipped_share(layers), len(layers)
    if shares is None:
        return sentence_figure(f"No curve: {why_no_shares(layers)}.", height)
    figure = go.Figure(layout=base_layout(height))
    bottom = math.log10(LEAST_SHARE)
    shown = [max(share * 100, LEAST_SHARE) if share else None for share in shares]
    figure.add_scatter(
        x=list(range(count + 1)),
        y=shown,
        mode="lines+markers",
        line={"color": READING_COLOUR, "width": 2},
        marker={
            "size": _marker_size(count),
            "symbol": ["triangle-down" if share * 100 < LEAST_SHARE else "circle" for share in shares],
        },
        customdata=[percent(share) for share in shares],
        hovertemplate="cutoff %{x} skips %{customdata}<extra></extra>",
    )
    for at, share in enumerate(shares):
        if not share:
            aside = 7 if at == cutoff else 0  # not under the line
            _write(figure, "0", at, bottom, count, hover=f"cutoff {at} skips exactly 0", xshift=aside)
    level = max(tolerance * 100, LEAST_SHARE)
    figure.add_hline(level, line={"color": TEXT_COLOUR, "width": 1, "dash": "dot"})
    figure.add_annotation(
        text=f"tolerance {percent(tolerance)}", x=0.01, y=math.log10(level), xref="paper", showarrow=False,
        xanchor="left", yanchor="bottom" if tolerance < 0.5 else "top", font={"size": 12},
    )  # fmt: skip
    if cutoff is not None:
        at = min(max(cutoff, 0), count)
        _add_cutoff(figure, at, cutoff, count, y=1, yanchor="bottom")
        if shown[at] is not None:
            figure.add_scatter(
                x=[at], y=[shown[at]], mode="markers", hoverinfo="skip",
                marker={"size": 12, "symbol": "circle-open", "color": TEXT_COLOUR, "line": {"width": 2}},
            )  # fmt: skip
    percents = [0.1, 1, 10, 100]
    figure.update_yaxes(
        type="log", range=[bottom - 0.25, 2.1], tickvals=percents, ticktext=[f"{tick:g}%" for tick in percents],
        gridcolor=GRID_COLOUR, automargin=True, title=axis_title("importance skipped"),
    )  # fmt: skip
    figure.update_xaxes(layer_axis(count + 1), title=axis_title("cutoff", None))
    figure.update_layout(margin={"l": 8, "r": 12, "t": 28, "b": 44})
    return figure


def ablation_figure(result: dict, height: int = 300) -> go.Figure:
    """What really leaving out each layer does, while reading and while writing."""
    ablation = result["ablation"]
    if not ablation:
        return sentence_figure("Not measured in this analysis.", height)
    columns = [ablation[f"{stage}_kl"] for stage in STAGES]
    low, high = log_range(columns[0] + columns[1])
    titles = tuple(f"Left out while {word} · KL, nats a token" for word in ("reading", "writing"))
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.18)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": TEXT_COLOUR})
    vals, texts = ticks(low, high, most=3)
    for row, (stage, column) in enumerate(zip(STAGES, columns, strict=True), start=1):
        drawn = [value if value and value > 0 else None for value in column]
        figure.add_trace(
            go.Bar(
                x=list(range(len(column))),
                y=[value and max(value, 10**low) for value in drawn],
                marker={"color": COLOURS[stage], "line": {"width": 0}},
                customdata=[figures(value) for value in column],
                hovertemplate="layer %{x}: %{customdata} nats a token<extra></extra>",
            ),
            row=row,
            col=1,
        )
        for layer, value in enumerate(column):
            if not drawn[layer]:
                text = "NaN" if value is None else "0"
                _write(figure, text, layer, low, len(column), f"layer {layer}: {text}", row, yanchor="bottom")
        figure.update_yaxes(
            type="log", range=[low - 0.1, high + 0.1], tickvals=[10**v for v in vals], ticktext=texts,
            gridcolor=GRID_COLOUR, zeroline=False, automargin=True, row=row, col=1,
        )  # fmt: skip
    figure.update_xaxes(layer_axis(len(columns[0])))
    figure.update_xaxes(title=axis_title("layer", None), row=2, col=1)
    figure.update_layout(base_layout(height), margin={"l": 8, "r": 12, "t": 28, "b": 44}, bargap=0.25)
    return figure


def layers_preview(result: dict) -> str:
    """The heatmap alone as plain HTML: something to see in the seconds that a browser takes to load Plotly."""
    values, low, high = _heat_rows(result["layers"])
    rows = []
    for (_, _, label), row in zip(rows_of(result["layers"]), values, strict=True):
        places = [(math.log10(value) - low) / (high - low) if value else None for value in row]
        colours = sample_colorscale(SCALE, [min(max(place or 0.0, 0.0), 1.0) for place in places])
        cells = "".join(
            f"<i>{figures(value)}</i>" if place is None else f'<i style="background:{colour}"></i>'
            for value, place, colour in zip(row, places, colours, strict=True)
        )
        rows.append(f"<span>{label}</span><span>{cells}</span>")
    return f'<div class="preview" role="img" aria-label="Importance by layer, loading">{"".join(rows)}</div>'


def rows_of(layers: list[dict]) -> list[tuple[str, str, str]]:
    """The heatmap's rows from the top down: (stage or kind, branch, label)."""
    stages = (*KINDS, *STAGES) if has_kinds(layers) else STAGES
    names = dict(zip(BRANCHES, ("attention", "FFN"), strict=True))
    return [(stage, branch, f"{WORDS[stage]} · {name}") for stage in stages for branch, name in names.items()]


def _heat_rows(layers: list[dict]) -> tuple[list[list], float, float]:
    """The values of the heatmap from the top down, and the log10s that its colours span."""
    values = [[entry[f"{stage}_{branch}"] for entry in layers] for stage, branch, _ in rows_of(layers)]
    return values, *log_range([value for row in values for value in row])


def _layer_hover(entry: dict, stage: str, label: str, value: float | None) -> str:
    error = entry[f"{stage}_se"]
    rough = "" if error is None else f"<br>standard error of both branches {figures(error)}"
    return f"layer {entry['layer']}<br>{label}: {figures(value)}{rough}"


def _write(figure, text: str, x: float, y: float, places: int, hover: str | None = None, row: int = 0, **more) -> None:
    """What stands where there is no mark. Longer text is turned, as a layer is narrow. y is a log10 on a log axis."""
    long = len(text) > 1
    small = places > (24 if long else 36)
    figure.add_annotation(
        x=x, y=y, text=text, textangle=-90 if long else 0, showarrow=False, hovertext=hover,
        font={"size": 8 if small else 11}, **({"row": row, "col": 1} if row else {}), **more,
    )  # fmt: skip


def _add_ratios(figure: go.Figure, values: list[float | None]) -> None:
    """The lower half of `layers_figure`: ratios with a line, what is no number above or below."""
    finite = [value for value in values if value and math.isfinite(value)]
    low, high = log_range([*finite, 1.0])
    above = 0.3 * (high - low) if math.inf in values else 0.1  # where an infinite ratio stands over all others
    low, high = low - 0.3, min(high + 0.2 + above, HIGHEST)
    figure.add_hline(1, line={"color": TEXT_COLOUR, "width": 1, "dash": "dot"}, row=2, col=1)
    figure.add_trace(
        go.Scatter(
            x=list(range(len(values))),
            y=[max(value, 10**low) if value and math.isfinite(value) else None for value in values],
            mode="lines+markers",
            line={"color": WRITING_COLOUR, "width": 2},
            marker={"size": _marker_size(len(values))},
            customdata=[figures(value) for value in values],
            hovertemplate="layer %{x}: writing/reading %{customdata}<extra></extra>",
        ),
        row=2,
        col=1,
    )
    near = 0.1 * (high - low)
    ends = (
        (math.inf, high - near, "∞", "triangle-up", "infinite, as reading has 0"),
        (0, low + near, "0", "triangle-down", "0, as writing has 0"),
        (None, low + near, "n/a", None, "unknown, or both are 0"),
    )
    for which, y, text, symbol, why in ends:
        at = [layer for layer, value in enumerate(values) if value == which]
        for layer in at:
            hover, shift = f"layer {layer}: writing/reading is {why}", {"∞": -11, "0": 11}.get(text, 0)
            _write(figure, text, layer, y, len(values), hover, row=2, yshift=shift)
        if at and symbol:
            marker = {"size": 9, "symbol": symbol, "color": WRITING_COLOUR}
            figure.add_scatter(x=at, y=[10**y] * len(at), mode="markers", marker=marker, hoverinfo="skip", row=2, col=1)
    vals, texts = ticks(low, high, most=5)
    figure.update_yaxes(
        type="log", range=[low, high], tickvals=[10**v for v in vals], ticktext=texts, gridcolor=GRID_COLOUR,
        zeroline=False, automargin=True, title=axis_title("writing / reading"), row=2, col=1,
    )  # fmt: skip


def _add_cutoff(figure: go.Figure, x: float, cutoff: int, layers: int, **place) -> None:
    """A dashed line through all subplots, its label beside it, away from the nearer edge."""
    line = {"color": TEXT_COLOUR, "width": 1.5, "dash": "dash"}
    figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, xref="x", yref="paper", line=line)
    late = x > layers / 2
    figure.add_annotation(
        text=f"cutoff {cutoff}", x=x, xref="x", yref="paper", showarrow=False, font={"size": 12},
        xanchor="right" if late else "left", xshift=-4 if late else 4, **place,
    )  # fmt: skip


def _marker_size(places: int) -> int:
    return 6 if places <= 40 else 3
