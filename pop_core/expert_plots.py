"""The experts of a study's mixtures as a Plotly figure. Takes `Study.to_dict()` or a recorded one, imports no torch."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .channel_findings import experts_sentence
from .channel_plots import SCALE, colour_bar
from .channel_view import layers, left_out, mixtures
from .findings import percent
from .plots import GRID_COLOUR, PRUNED_COLOUR, axis_title, base_layout, sentence_figure


def experts_figure(result: dict) -> go.Figure:
    """Prompt tokens routed to each expert, by layer; crosses where an expert stayed whole; and what each layer lost."""
    shown = [(at, layers(result)[at]) for at in mixtures(result)]
    height = min(760, 200 + 18 * max(8, len(shown)))
    if not shown:
        return sentence_figure(experts_sentence(result), 160)
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, column_widths=[0.74, 0.26], horizontal_spacing=0.03)
    wide = max(len(layer["tokens"]) for _, layer in shown)
    names = [f"layer {at}" for at, _ in shown]
    places = list(range(len(shown)))
    most = max(max(layer["tokens"]) for _, layer in shown)
    figure.add_trace(
        go.Heatmap(
            x=list(range(wide)), y=places, z=[_padded(layer["tokens"], wide) for _, layer in shown], zmin=0, zmax=most,
            customdata=[[name] * wide for name in names], colorscale=SCALE, xgap=1, ygap=1, hoverongaps=False,
            hovertemplate="%{customdata}, expert %{x}<br>%{z} prompt tokens<extra></extra>",
            colorbar=colour_bar("prompt tokens routed to an expert", None, None, y=1.02),
        ),
        row=1,
        col=1,
    )  # fmt: skip
    whole = [(expert, at) for at, (_, layer) in enumerate(shown) for expert in layer["whole"]]
    if whole:
        figure.add_trace(
            go.Scatter(
                x=[expert for expert, _ in whole], y=[at for _, at in whole], mode="markers", hoverinfo="skip",
                marker={"symbol": "x", "size": 9 if wide <= 32 else 5, "color": PRUNED_COLOUR},
            ),
            row=1,
            col=1,
        )  # fmt: skip
    shares = [left_out(layer) for _, layer in shown]
    figure.add_trace(
        go.Bar(
            x=shares, y=places, orientation="h", marker={"color": PRUNED_COLOUR},
            text=[percent(share) for share in shares], textposition="outside", textangle=0, cliponaxis=False,
            hovertemplate="%{text} of the channels add nothing<extra></extra>",
        ),
        row=1,
        col=2,
    )  # fmt: skip
    figure.update_xaxes(showgrid=False, zeroline=False, tickangle=0, row=1, col=1)
    figure.update_xaxes(_expert_axis(shown, wide), title=axis_title("expert (× stayed whole)", None), row=1, col=1)
    figure.update_xaxes(
        range=[0, 1.6], tickvals=[0, 1], ticktext=["0%", "100%"], gridcolor=GRID_COLOUR, zeroline=False,
        title=axis_title("left out", None), row=1, col=2,
    )  # fmt: skip
    figure.update_yaxes(
        range=[len(shown) - 0.5, -0.5], tickvals=places, ticktext=[str(at) for at, _ in shown], showgrid=False,
        zeroline=False, automargin=True,
    )  # fmt: skip
    figure.update_yaxes(title=axis_title("layer"), row=1, col=1)
    figure.update_layout(base_layout(height), margin={"l": 8, "r": 16, "t": 72, "b": 56}, bargap=0.25)
    return figure


def _padded(values: list[int], wide: int) -> list:
    return [*values, *[None] * (wide - len(values))]


def _expert_axis(shown: list[tuple[int, dict]], wide: int) -> dict:
    """Numbers of experts."""
    step = next((step for step in (1, 2, 5, 10, 20, 50) if wide <= 12 * step), 100)
    return {"range": [-0.5, wide - 0.5], "tickmode": "linear", "tick0": 0, "dtick": step}
