"""Results to Plotly figures. Takes plain dicts, imports no torch; dense is blue and pruned orange everywhere.

Figures have a transparent background and mid-grey text, so that they sit on a light and on a dark page, and a fixed
height. What was not measured is written out, never drawn as zero or NaN.
"""

import html
import textwrap

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .sentences import before_reading_ms, first_token_ms, milliseconds

DENSE_COLOUR, PRUNED_COLOUR = "#0072B2", "#E69F00"  # Okabe and Ito's, told apart with any colour vision
TEXT_COLOUR = "#777777"  # 4.5:1 on white, 4.2:1 on the dark page
GRID_COLOUR = "rgba(128, 128, 128, 0.25)"
HOVER = {"bgcolor": "#1d2733", "bordercolor": "#1d2733", "font": {"color": "#ffffff"}}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
RUNS = (("pruned", "Pruned", PRUNED_COLOUR), ("dense", "Dense", DENSE_COLOUR))  # drawn from the bottom up


def timing_figure(result: dict, height: int = 280) -> go.Figure:
    """Time to first token and time per token of both runs, medians with the fastest and slowest round as whiskers."""
    titles = ("Time to first token", "Time per further token")
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=0.34)
    for row, kind in enumerate(("prefill", "step"), start=1):
        for name, label, colour in RUNS:
            figure.add_trace(_bar(result, name, label, colour, kind), row=row, col=1)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": TEXT_COLOUR})
    figure.update_xaxes(
        rangemode="tozero", ticksuffix=" ms", gridcolor=GRID_COLOUR, zeroline=False, nticks=4, tickangle=0
    )
    figure.update_yaxes(showgrid=False, automargin=True)
    figure.update_layout(base_layout(height), bargap=0.3)
    return figure


def base_layout(height: int) -> dict:
    """What the layout of every figure shares."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": TEXT_COLOUR},
        "showlegend": False,
        "dragmode": False,
        "hoverlabel": HOVER,
    }


def sentence_figure(sentence: str, height: int) -> go.Figure:
    """A figure that says why there is none."""
    figure = go.Figure(layout=base_layout(height))
    text = "<br>".join(escaped(line) for line in textwrap.wrap(sentence, 38))  # a phone is 390 px wide
    figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def axis_title(text: str, standoff: int | None = 4) -> dict:
    """Of an axis. Beneath subplots a standoff is misjudged, so there it is left to Plotly."""
    return {"text": text, "standoff": standoff, "font": {"size": 13}}


def escaped(text: str) -> str:
    """Text that Plotly, which knows some HTML, shows as it is."""
    return html.escape(text, quote=False)


def _bar(result: dict, name: str, label: str, colour: str, kind: str) -> go.Bar:
    """One bar whose own name says its value, so that no label can collide with a whisker."""
    shown, spread = result[f"{name}_{kind}_ms"], result[f"{name}_{kind}_spread"]
    extra = 0.0
    if kind == "prefill":
        shown, extra = first_token_ms(result, name), before_reading_ms(result[name])
    whiskers = None
    if shown is not None and spread:
        low, high = (max(0.0, side + extra) for side in spread)
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high - shown)],
            "arrayminus": [max(0.0, shown - low)],
            "color": TEXT_COLOUR,
            "thickness": 1.5,
            "width": 5,
        }
    return go.Bar(
        x=[0 if shown is None else shown],
        y=[f"{label} · {milliseconds(shown)} "],
        orientation="h",
        marker={"color": colour},
        error_x=whiskers,
        hoverinfo="skip" if shown is None else None,
        hovertemplate=None if shown is None else f"{label}: {milliseconds(shown)}<extra></extra>",
    )
