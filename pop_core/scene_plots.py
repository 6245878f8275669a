"""What skipping layers costs in answers: exact answers on held-out scenes by cutoff, as a figure and in words.

Takes the recorded result of `scripts/record.py scenes` (`SceneQuality.to_dict()`s under "plans"), imports no torch.
"""

import plotly.graph_objects as go

from .plan import FITTED, OWN
from .plots import DENSE_COLOUR, GRID_COLOUR, PRUNED_COLOUR, TEXT_COLOUR, base_layout
from .units import count, percent

HEIGHT = 300
# (projections, sinks, boundary) -> name, colour, dash and marker: told apart without colour too
LINES = {
    (OWN, 0, 1): ("own projections", PRUNED_COLOUR, "solid", "circle"),
    (FITTED, 0, 1): ("fitted projections", "#009E73", "dash", "square"),
    (FITTED, 4, 16): ("fitted, 4 sinks, boundary of 16", "#CC79A7", "dot", "diamond"),
}


def answers_figure(result: dict) -> go.Figure:
    """A line for each kind of projection, and the dense model's as a level."""
    figure = go.Figure(layout=base_layout(HEIGHT))
    dense = result["plans"][0]["accuracy_dense"]
    for key, (name, colour, dash, marker) in LINES.items():
        found = by_cutoff(result, key)
        figure.add_trace(
            go.Scatter(
                x=[quality["plan"]["prefill"]["cutoff"] for quality in found],
                y=[quality["accuracy"] for quality in found],
                customdata=[quality["kl"] for quality in found],
                name=name,
                mode="lines+markers",
                line={"color": colour, "dash": dash},
                marker={"symbol": marker, "size": 8},
                hovertemplate=name + "<br>cutoff %{x}: %{y:.1%} exact, KL %{customdata:.3f}<extra></extra>",
            )
        )
    figure.add_hline(dense, line={"color": DENSE_COLOUR, "dash": "dot", "width": 1.5})
    figure.add_annotation(
        x=1, xref="paper", xanchor="right", y=dense, yanchor="bottom", text=f"dense {percent(dense)}", showarrow=False
    )
    figure.update_xaxes(title="layers that read the prompt", dtick=1, gridcolor=GRID_COLOUR, zeroline=False)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.05], gridcolor=GRID_COLOUR, zeroline=False)
    figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "y": -0.32, "x": 0, "font": {"color": TEXT_COLOUR}},
        margin={"l": 8, "r": 16, "t": 12, "b": 90},
    )
    return figure


def answers_sentence(result: dict) -> str:
    """How few layers keep 98% of the exact answers, and with what."""
    dense, first = result["plans"][0]["accuracy_dense"], result["plans"][0]
    asked = f"{count(first['scenes'], 'held-out scene')} and {first['questions']:,} questions"
    kept = {}
    for key, (name, *_) in LINES.items():
        enough = [q for q in by_cutoff(result, key) if q["accuracy"] >= 0.98 * dense]
        kept[name] = min((q["plan"]["prefill"]["cutoff"] for q in enough), default=None)
    said = "; ".join(f"{name} {'never' if least is None else f'from {least} layers'}" for name, least in kept.items())
    exact = f"Dense, {percent(dense)} of all answers are exact, to the last word"
    return f"{exact}. At least 98% of that is kept with: {said}. Recorded on {asked}."


def by_cutoff(result: dict, key: tuple[str, int, int]) -> list[dict]:
    """The recorded plans of one line, by ascending cutoff; those that prune channels too are not among them."""
    found = [
        quality
        for quality in result["plans"]
        if (cut := quality["plan"]["prefill"])
        and not quality["plan"]["channels"]
        and (cut["kv"], cut["sinks"], cut["boundary"]) == key
    ]
    return sorted(found, key=lambda quality: quality["plan"]["prefill"]["cutoff"])
