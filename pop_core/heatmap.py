"""What heatmaps of importance share: one colour-blind-safe scale, logarithmic, and an axis of layers."""

import math

import plotly.graph_objects as go

from .log_scale import ticks

SCALE = "Cividis"
NATS = "importance, nats (log scale)"


def heat(values: list, hovers: list, low: float, high: float, **axes) -> go.Heatmap:
    """A heatmap on a log scale, its colour bar above it; 0 and unknown values have no colour. low, high: log10s."""
    known = any(value for row in values for value in row)
    vals, texts = ticks(low, high)
    return go.Heatmap(
        z=[[round(max(math.log10(value), low), 3) if value else None for value in row] for row in values],
        customdata=hovers,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=True,
        zmin=low,
        zmax=high,
        colorscale=SCALE,
        showscale=known,  # without a single colour there is nothing to explain
        xgap=1,
        ygap=1,
        colorbar={
            "orientation": "h", "thickness": 10, "y": 1.01, "yanchor": "bottom", "x": 0, "xanchor": "left", "len": 1,
            "xpad": 0, "ypad": 6, "outlinewidth": 0, "tickvals": vals, "ticktext": texts, "tickfont": {"size": 11},
            "title": {"text": NATS, "side": "top", "font": {"size": 12}},
        },
        **axes,
    )  # fmt: skip


def layer_axis(count: int) -> dict:
    """An axis of whole numbers from 0."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if count <= 10 * step or step == 1000)
    return {
        "range": [-0.5, count - 0.5], "tickmode": "linear", "tick0": 0, "dtick": step, "tickangle": 0,
        "showgrid": False, "zeroline": False, "tickfont": {"size": 12},
    }  # fmt: skip
