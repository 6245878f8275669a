"""A study of channels in words: sentences generated from its data, as ready to say that pruning lost.

Everything here takes `Study.to_dict()` (or a recorded one) and returns plain text; whoever shows it escapes it.
"""

import math
import statistics

from . import channel_words
from .channel_view import (
    OURS,
    chance,
    channels,
    kept_bits,
    layers,
    left_out,
    mixtures,
    pruning,
    row,
    single,
    step_overlaps,
)
from .plan import ALL, CANDIDATES, NONE
from .sentences import difference_sentence, picture_facts
from .units import count, date, percent

NEAR = 0.02  # an overlap that is no further from chance is called chance
WHY_NO_MAP = "Every layer of this model is a mixture of experts, and each expert has channels of its own: the map of "
WHY_NO_MAP += "experts stands in for this one"


def answers_sentence(result: dict) -> str:
    """Under the answers: where they part, and what share of the model was left out to get there."""
    written = len(result["dense"]["tokens"])
    if result["dense"]["stop"] == "cancelled" and result["first_divergence"] in (None, written):
        said = f"Stopped while the dense answer was written; its first {count(written, 'token')} are the same."
        said = said if written else "Stopped before the dense answer was written, so nothing is compared."
    else:
        said = difference_sentence(result | {"agreement": row(result, OURS)["agreement"]})
    share = result["pruned"]["removed_share"]
    if not result["pruned"]["step_ms"]:
        return f"{said} The pruned answer has no second token, so none was written with fewer channels."
    return f"{said} {percent(share)} of the model's weights added nothing to a token of the pruned answer."


def map_sentence(result: dict) -> str:
    """Under the map of the layers: how steep the scores are, and what is left to candidates and pruned ones."""
    shown = [(at, layer) for at, layer in enumerate(layers(result)) if layer.get("profile")]
    if not shown:
        return why_no_map(result)
    _, layer = shown[0]
    said = [
        f"In each layer {percent(layer['retained'] / channels(layer))} of the channels are retained, "
        f"{_band(layer)} and {percent(layer['pruned'] / channels(layer))} are pruned for this prompt."
    ]
    if any(_shares(layer) != _shares(other) for _, other in shown):
        said = ["The layers are not all split alike; the table has the numbers of each."]
    middles = {at: layer["profile"][len(layer["profile"]) // 2] for at, layer in shown}
    flat, steep = max(middles, key=middles.__getitem__), min(middles, key=middles.__getitem__)
    said.append(
        f"A channel in the middle of its layer has {percent(statistics.median(middles.values()))} of the score of the "
        f"strongest ones (the median of the layers)"
        + (
            f": from {percent(middles[steep])} in layer {steep} to {percent(middles[flat])} in layer {flat}."
            if flat != steep
            else "."
        )
    )
    missing = len(single(result)) - len(shown)
    if mixtures(result):
        said.append("The mixtures of experts are not drawn here but below.")
    if missing:
        said.append(f"{count(missing, 'layer')} had no scores, so nothing is drawn there.")
    return " ".join(said)


def _shares(layer: dict) -> tuple[int, int, int]:
    return layer["retained"], layer["candidates"], layer["pruned"]


def _band(layer: dict) -> str:
    if not layer["candidates"]:
        return "none are candidates"
    return f"{percent(layer['candidates'] / channels(layer))} are candidates"


def why_no_map(result: dict) -> str:
    """The reason that no layer has a profile of scores."""
    if not layers(result):
        return "Nothing was written, so there are no scores to show."
    if not single(result):
        return f"{WHY_NO_MAP}."
    if pruning(result)["rescore"] == ALL:
        return "Every token scores all channels anew, so the prompt's scores split nothing and are not kept."
    return "No layer has scores: none of them was reached by a token of the prompt, or all scores are 0."


def why_no_choice(result: dict, layer: int) -> str:
    """The reason that a layer has no candidates to show, or ""."""
    known = layers(result)
    if not known:
        return "Nothing was written, so nothing was chosen."
    if not single(result):
        return f"{WHY_NO_MAP}."
    entry = known[layer]
    if layer not in single(result):
        return f"Layer {layer} is a mixture of experts, each with candidates of its own; choose another layer."
    if chance(entry) is None:
        if pruning(result)["rescore"] == NONE:
            return "A fixed mask has no candidates: every token gets the same channels."
        return f"In layer {layer} there is nothing to choose: it has {count(entry['candidates'], 'candidate')}."
    if not result["pruned"]["tokens"]:
        return "The answer is empty: the model ended it at once, so no token chose."
    if not entry["kept"]:
        return "The answer has a single token, which comes from the prompt alone; from the second one on tokens choose."
    return ""


def chosen_sentence(result: dict, layer: int) -> str:
    """Under the candidates of one layer: how many were always or never kept, and who chose most like before."""
    why = why_no_choice(result, layer)
    if why:
        return why
    entry = layers(result)[layer]
    bits = kept_bits(entry)
    counts = [sum(column) for column in zip(*bits, strict=True)]
    always, never = counts.count(len(bits)), counts.count(0)
    said = (
        f"In layer {layer}, each of {count(len(bits), 'token')} kept {entry['chosen']:,} of "
        f"{count(entry['candidates'], 'candidate')}: {always:,} of them were kept by every token, {never:,} by none."
    )
    overlaps = [(value, at) for at, value in enumerate(step_overlaps(entry)) if value is not None]
    if not overlaps:
        return f"{said} With one choice there is no step to compare."
    low, at = min(overlaps)
    return (
        f"{said} From one token to the next {percent(_mean(value for value, _ in overlaps))} of the choice stayed on "
        f"average, least ({percent(low)}) at token {at + 1}."
    )


def overlap_sentence(result: dict) -> str:
    """Under the overlaps: whether steps agree more than chance would have it, candidates and all channels."""
    shown = [(at, layers(result)[at]) for at in single(result)]
    known = [(at, layer["overlap"], chance(layer)) for at, layer in shown if layer["overlap"] is not None]
    known = [(at, value, expected) for at, value, expected in known if expected is not None]
    halves = [value for value in result["top_half"] if value is not None]
    said = []
    if known:
        mean, expected = _mean(value for _, value, _ in known), _mean(e for _, _, e in known)
        side = "as chance alone would have it" if abs(mean - expected) <= NEAR else "more than by chance"
        side = "less than by chance" if mean < expected - NEAR else side
        most = max(known, key=lambda entry: entry[1])
        said.append(
            f"On average {percent(mean)} of a token's candidates are kept by the next token too, {side} "
            f"({percent(expected)}); most in layer {most[0]} ({percent(most[1])})."
        )
    if halves:
        mean = _mean(halves)
        side = "above chance" if mean > 0.5 else "below chance"
        side = "hardly more than chance" if abs(mean - 0.5) <= NEAR else side
        said.append(
            f"Of the best half of all channels {percent(mean)} stay the best half at the next token of the dense "
            f"answer, {side} (50%): {_need(mean)}."
        )
    if said:
        return " ".join(said)
    if not single(result):
        return f"{WHY_NO_MAP}."
    return "No two tokens chose one after the other, so there is nothing to compare."


def _need(mean: float) -> str:
    if mean < 0.75:
        return "what a token needs changes from step to step"
    return "most of what one token needs, the next one needs too"


def experts_sentence(result: dict) -> str:
    """Under the map of experts: how many the prompt reached, and what that does to the share left out."""
    shown = [(at, layers(result)[at]) for at in mixtures(result)]
    if not shown:
        return "This model has no mixtures of experts."
    total, whole = sum(len(layer["tokens"]) for _, layer in shown), sum(len(layer["whole"]) for _, layer in shown)
    shares = [left_out(layer) for _, layer in shown]
    reached = f"The {count(result['pruned']['prompt_tokens'], 'prompt token')} reached {total - whole:,} of {total:,}"
    said = f"{reached} experts of {count(len(shown), 'layer')}; "
    if whole:
        said += f"{'the other one' if whole == 1 else f'the other {whole:,}'} stayed whole. "
    else:
        said += "none stayed whole. "
    asked, got = pruning(result)["ratio"], _mean(shares)
    said += f"So {percent(got)} of these layers' channels added nothing to a token"
    uneven = max(shares) - min(shares) > 0.01
    span = f", from {percent(min(shares))} to {percent(max(shares))} by layer" if uneven else ""
    asks = f", where {percent(asked)} was asked for" if abs(asked - got) > 0.01 else ""
    apart = " Each expert has its own channels, so maps of them by rank and by token are not drawn."
    return f"{said}{span}{asks}.{'' if single(result) else apart}"


def caption(result: dict) -> str:
    """Whose numbers these are, for the line above the answers."""
    chosen = pruning(result)
    width = f", candidate width {percent(chosen['width'])}" if chosen["rescore"] == CANDIDATES else ""
    how = {NONE: ", fixed mask", ALL: ", all channels re-scored"}.get(chosen["rescore"], "")
    return (
        f"{result['model']}: prune ratio {percent(chosen['ratio'])}{width}{how}, "
        f"{percent(result['pruned']['removed_share'])} of the whole model; {date(result['date'])}, {result['machine']}"
    )


def ending(result: dict) -> str:
    """How a study ended, for the line of its status."""
    if result["complete"]:
        return f"Done: your own study of {result['model']}, made just now"
    if result["rounds"]:
        return "Stopped: all methods are compared, the times are of fewer steps"
    return "Stopped: what was done until then is shown, the rest was not measured"


def facts(result: dict) -> list[tuple[str, str]]:
    """What was run and on what, as (name, value)."""
    dense, pruned, chosen = result["dense"], result["pruned"], pruning(result)
    width = [("Candidate width", percent(chosen["width"]))] if chosen["rescore"] == CANDIDATES else []
    return [
        ("Model", result["model"]),
        ("Prompt", f"“{' '.join(pruned['prompt'].split())[:48]}…”"),
        ("Its length", f"{count(pruned['prompt_tokens'], 'token')}, {'chat template' if pruned['chat'] else 'plain'}"),
        *picture_facts(pruned),
        ("Prune ratio, of each FFN", percent(chosen["ratio"])),
        *width,
        ("Re-scored at every token", chosen["rescore"]),
        ("Weight of a channel in its score", chosen["score"]),
        *channel_words.facts(pruned),
        ("Written", f"{len(dense['tokens'])} dense, {len(pruned['tokens'])} pruned"),
        ("Compared along the dense answer", count(result["tokens"], "token")),
        ("Timed", count(result["rounds"], "paired step")),
        ("Device", f"{result['machine']}, {dense['dtype']}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("Date", date(result["date"])),
    ]


def _mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
