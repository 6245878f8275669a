"""The layer x token map of a prompt with pictures, laid over them, as Plotly figures.

Takes `Importance.to_dict()` (or a recorded one), imports no torch. Colours mean the same in every layer.
"""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .heatmap import heat
from .log_scale import figures, log_range
from .picture_view import Grid, grids, has_pictures
from .plots import TEXT_COLOUR, base_layout, sentence_figure

MOST_SHOWN = 6  # pictures of a prompt; a map is told from the next by eye
SIDE, TOP, BOTTOM, TITLE = 320, 62, 8, 24  # pixels: of a picture's longer side, and around and between pictures
OPACITY = 0.7  # of the map, so that the picture is seen through it
DECADES = 3  # below the largest value; what is smaller looks the same, as the picture takes half of the contrast
MOST_RATIO = 4.0  # of a picture's sides as it is drawn


def overlay_figure(result: dict, layer: int) -> go.Figure:
    """One layer's importance of each image token over its part of the picture, a picture each of at most
    `MOST_SHOWN`, beneath each other."""
    if not has_pictures(result):
        return sentence_figure("This analysis has no pictures.", 120)
    figure, scale = _pictures(result)
    for row, grid in enumerate(_shown(grids(result)[layer]), start=1):
        figure.add_trace(_map(grid, *scale), row=row, col=1)
    return figure


def layered_figure(result: dict) -> go.Figure:
    """The same for all layers with a slider of its own, for a file that nobody answers. Wants pictures."""
    figure, scale = _pictures(result)
    maps = [_shown(pictures) for pictures in grids(result)]
    count = len(maps[0])
    for layer, pictures in enumerate(maps):
        for row, grid in enumerate(pictures, start=1):
            figure.add_trace(_map(grid, *scale).update(visible=layer == 0), row=row, col=1)
    steps = [
        {
            "label": str(layer),
            "method": "restyle",
            "args": ["visible", [at // count == layer for at in range(count * len(maps))]],
        }
        for layer in range(len(maps))
    ]
    figure.update_layout(
        sliders=[{"steps": steps, "currentvalue": {"prefix": "layer "}, "pad": {"t": 16}}],
        height=figure.layout.height + 96,
        margin_b=104,
    )
    return figure


def _shown(pictures: list[Grid]) -> list[Grid]:
    return pictures[:MOST_SHOWN]


def _pictures(result: dict) -> tuple[go.Figure, tuple[float, float, float]]:
    """The pictures without their maps, and how to draw those: the log10s that the colours of all layers span, and the
    room above the first picture as a share of the height."""
    facts, places = _shown(result["pictures"]), _shown(result["token_map"]["pictures"])
    values = [value for pictures in grids(result) for grid in pictures for row in grid for value in row]
    sizes = [_size(fact) for fact in facts]
    heights = [height for _, height in sizes]
    titles = [f"Picture {number}" for number in range(1, len(facts) + 1)] if len(facts) > 1 else None
    whole = sum(heights) + TITLE * (len(facts) - 1)
    figure = make_subplots(
        rows=len(facts), cols=1, row_heights=heights, subplot_titles=titles,
        vertical_spacing=TITLE / whole if titles else 0,
    )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left", font={"size": 12, "color": TEXT_COLOUR})
    for number, (fact, place, (width, height)) in enumerate(zip(facts, places, sizes, strict=True), start=1):
        rows, columns = place["rows"], place["columns"]
        figure.add_layout_image(
            source=fact.get("thumbnail"), x=0, y=0, sizex=columns, sizey=rows, sizing="stretch", layer="below",
            xref=f"x{number}", yref=f"y{number}",
        )  # fmt: skip
        hidden = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": "", "fixedrange": True}
        # rows go down; a cell is as wide as its part of the picture
        ratio = (height / rows) / (width / columns)
        figure.update_yaxes(
            range=[rows, 0], scaleanchor=f"x{number}", scaleratio=ratio, constrain="domain", **hidden,
            row=number, col=1,
        )  # fmt: skip
        figure.update_xaxes(range=[0, columns], constrain="domain", constraintoward="left", **hidden, row=number, col=1)
    top = TOP + TITLE * bool(titles)
    figure.update_layout(base_layout(whole + top + BOTTOM), margin={"l": 0, "r": 0, "t": top, "b": BOTTOM})
    low, high = log_range(values)
    return figure, (max(low, high - DECADES), high, (TITLE if titles else 4) / whole)


def _size(fact: dict) -> tuple[float, float]:
    """Width and height to draw a picture at, in pixels."""
    ratio = min(max(fact["width"] / fact["height"], 1 / MOST_RATIO), MOST_RATIO)
    return (SIDE, SIDE / ratio) if ratio > 1 else (SIDE * ratio, SIDE)


def _map(grid: Grid, low: float, high: float, above: float) -> go.Heatmap:
    """The grid as a heatmap whose first row is at the top, a unit a cell. above: where the colour bar is, as a share of
    the height."""
    hovers = [
        [f"row {row}, column {column}<br>{figures(value)} nats" for column, value in enumerate(line, start=1)]
        for row, line in enumerate(grid, start=1)
    ]
    drawn = heat(grid, hovers, low, high, x0=0.5, dx=1, y0=0.5, dy=1)
    drawn.update(opacity=OPACITY, xgap=0, ygap=0, showscale=True)
    drawn.colorbar.update(lenmode="pixels", len=280, y=1 + above)
    return drawn
