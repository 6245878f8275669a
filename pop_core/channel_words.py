"""Channels in words: what leaving FFN channels out will do, and what it did. The rest of a comparison: `sentences.py`.

What was done is taken from the facts of the run (`channel_facts.facts`), never from what was asked for: an expert that
no prompt token reached, for one, stays whole.
"""

from .forecast import ChannelForecast
from .plan import Budget
from .units import count, milliseconds, percent, times

NOISE = 0.03  # a ratio closer to 1 than this is called no difference


def written(run: dict) -> tuple[int, int] | None:
    """(FFN channels that contributed to a token, FFN channels), over all layers and experts; None of a run that chose
    none by its prompt, or is not done."""
    if not run.get("channels") or not run["step_ms"]:  # the first token comes from the prompt, which is read dense
        return None
    layers = run["channels"]["layers"]
    return _sum(layers, "retained", "chosen"), _sum(layers, "retained", "candidates", "pruned")


def written_share(run: dict) -> float | None:
    """The same as a share."""
    found = written(run)
    return None if found is None else found[0] / found[1]


def writes(run: dict) -> str:
    """How a run wrote, for the head of its answer; nothing if it wrote with everything."""
    share = written_share(run)
    if share is not None:
        return f"{percent(share)} of the FFN channels write" if share < 1 else ""
    removed = run.get("removed_share")
    return f"{percent(removed)} of the model does not write" if removed else ""


def plan_sentence(seen: ChannelForecast | None) -> str:
    """What the prune ratio does, for the line beside its slider."""
    if seen is None:
        return "All FFN channels write."
    said = f"The answer is written with {percent(1 - seen.ratio)} of the FFN channels"
    if not seen.budgets:
        return f"{said}; what that is of the model is told once it is loaded."
    if len(seen.budgets) == 1:
        split = _split(*seen.budgets[0][1:])
    else:
        split = "; ".join(f"in each {kind} {_split(width, budget)}" for kind, width, budget in seen.budgets)
    limit = f"which allows at most {times(seen.speedup)} per token"
    if seen.speedup <= 1:
        limit = "but all of their weights are read, so no time is saved"
    share, unsure = percent(seen.removed_share), _stays_whole(seen)
    goes = f"at most {share} of the whole model goes ({unsure})" if unsure else f"{share} of the whole model goes"
    return f"{said}: {split}; {goes}, {limit}."


def _split(width: int, budget: Budget) -> str:
    """What becomes of the channels of one FFN."""
    if not budget.retained and budget.candidates:
        return f"each token chooses {budget.chosen:,} of all {width:,}"
    stay = f"{budget.retained:,} of {width:,} stay"
    if not budget.candidates:
        return f"{stay}, the same for every token, {budget.pruned:,} go"
    candidates = count(budget.candidates, "candidate")
    return f"{stay}, each token chooses {budget.chosen:,} of {candidates}, {budget.pruned:,} go"


def _stays_whole(seen: ChannelForecast) -> str:
    """What will not be pruned, because there is no prompt token to score it with."""
    parts = ["experts that the prompt does not reach"] if seen.mixture else []
    if seen.pruned_layers < seen.layers:
        parts.append(f"layers {seen.pruned_layers}-{seen.layers - 1}, which no prompt token runs,")
    return f"{' and '.join(parts)} stay whole" if parts else ""


def writing_sentence(result: dict) -> str:
    """Whether leaving channels out made writing faster; for runs whose steps were timed."""
    run, speedup = result["pruned"], result["decode_speedup"]
    share = written_share(run)
    what = f"{percent(run['removed_share'])} of the model left out"
    if share is not None:
        what = f"{percent(share)} of the FFN channels ({percent(run['removed_share'])} of the model left out)"
    pair = f"{milliseconds(result['dense_step_ms'])} dense, {milliseconds(result['pruned_step_ms'])} pruned per token"
    most = result["predicted_decode_speedup"]
    limit = f"what it reads allows at most {times(most)}"
    if speedup > most + NOISE:
        limit += ", so noise of the machine has a part in it"
    if speedup > 1 + NOISE:
        return f"With {what}, writing is {times(speedup)} as fast ({pair}); {limit}."
    if speedup >= 1 - NOISE:
        return f"With {what}, writing takes about the same time ({pair}); {limit}."
    return f"Pruning loses: with {what}, writing goes at {times(speedup)} the speed of dense ({pair}); {limit}."


def reading_sentence(speedup: float, pair: str) -> str:
    """What choosing the channels costs a prompt that all layers read; pair: the times behind the speed-up."""
    said = "Both read the prompt with all layers, and the pruned run chooses its channels meanwhile"
    if speedup > 1 + NOISE:
        return f"{said}, which saves nothing: being {times(speedup)} as fast is noise of the machine ({pair})."
    if speedup >= 1 - NOISE:
        return f"{said}, which makes no measurable difference ({pair})."
    return f"{said}: it reads at {times(speedup)} the speed of dense ({pair})."


def choosing_sentence(run: dict) -> str:
    """Where the time of choosing is: once for the prompt, inside of its reading, and again at each token."""
    channels = run["channels"]
    if not channels:
        return ""
    parts, steps = [], len(run["step_ms"])
    if channels["scoring_ms"]:
        scoring, slicing = milliseconds(channels["scoring_ms"]), milliseconds(channels["slicing_ms"])
        parts.append(f"of the pruned reading, {scoring} went into scoring the channels and {slicing} into slicing them")
    if channels["rescoring_ms"] and steps:
        parts.append(f"re-scoring took {milliseconds(channels['rescoring_ms'] / steps)} of each token")
    said = "; ".join(parts)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def facts(run: dict) -> list[tuple[str, str]]:
    """What the run did with its channels, as (name, value); nothing if it chose none."""
    channels, steps = run["channels"], len(run["step_ms"])
    if not channels:
        return []
    found, layers = written(run), channels["layers"]
    kept = (
        f"{found[0]:,} of {found[1]:,} ({percent(found[0] / found[1])})" if found else "no token was written with fewer"
    )
    candidates, overlap, rescoring = _sum(layers, "candidates"), channels["overlap"], channels["rescoring_ms"]
    chosen = f"{_sum(layers, 'chosen'):,} of {count(candidates, 'candidate')}"
    if rescoring:
        rescoring = rescoring / steps if steps else None
    rows = [
        ("FFN channels that write", kept),
        ("Left out of the whole model", percent(run["removed_share"])),
        ("Chosen by each token", chosen if candidates else "no candidates"),
        ("Choices that the next token repeats", "n/a" if overlap is None else percent(overlap)),
        ("Scoring, part of the reading", milliseconds(channels["scoring_ms"])),
        ("Slicing, part of the reading", milliseconds(channels["slicing_ms"])),
        ("Re-scoring, of each token", "none" if rescoring == 0 else milliseconds(rescoring)),
    ]
    if channels["whole_ffns"]:
        whole = f"{channels['whole_ffns']:,} of {channels['ffns']:,}, reached by no prompt token"
        rows.insert(2, ("FFNs left whole", whole))
    return rows


def _sum(layers: list[dict], *names: str) -> int:
    return sum(layer[name] for layer in layers for name in names)
