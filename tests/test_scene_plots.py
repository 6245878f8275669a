"""Exact answers by cutoff: what is drawn and said is what was recorded."""

from pop_core.plan import FITTED, OWN, ChannelPruning, Plan, PrefillCut
from pop_core.scene_plots import LINES, answers_figure, answers_sentence, by_cutoff


def quality(plan: Plan, accuracy: float) -> dict:
    return {"plan": plan.to_dict(), "accuracy_dense": 0.9, "accuracy": accuracy, "kl": 1 - accuracy, "scenes": 20,
            "questions": 1234}  # fmt: skip


RESULT = {
    "plans": [
        quality(Plan(PrefillCut(11)), 0.9),
        quality(Plan(PrefillCut(8)), 0.5),
        quality(Plan(PrefillCut(11, FITTED)), 0.9),
        quality(Plan(PrefillCut(8, FITTED)), 0.885),
        quality(Plan(PrefillCut(6, FITTED)), 0.2),
        quality(Plan(PrefillCut(8, FITTED, 4, 16)), 0.3),
        quality(Plan(PrefillCut(8), ChannelPruning(0.4)), 0.1),
        quality(Plan(channels=ChannelPruning(0.4)), 0.1),
    ]
}


def test_each_line_has_its_plans_in_order():
    assert [q["accuracy"] for q in by_cutoff(RESULT, (OWN, 0, 1))] == [0.5, 0.9]
    figure = answers_figure(RESULT)
    drawn = {trace.name: list(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert drawn == {
        "own projections": [(8, 0.5), (11, 0.9)],
        "fitted projections": [(6, 0.2), (8, 0.885), (11, 0.9)],
        "fitted, 4 sinks, boundary of 16": [(8, 0.3)],
    }
    assert figure.layout.shapes[0].y0 == 0.9
    looks = {(trace.line.color, trace.line.dash, trace.marker.symbol) for trace in figure.data}
    assert len({dash for _, dash, _ in looks}) == len({marker for *_, marker in looks}) == len(LINES)


def test_the_sentence_says_from_how_many_layers_answers_are_kept():
    said = answers_sentence(RESULT)
    assert "own projections from 11 layers; fitted projections from 8 layers" in said
    assert "boundary of 16 never" in said
    assert "Dense, 90% of all answers" in said and "20 held-out scenes and 1,234 questions" in said
