"""An analysis in words: sentences generated from its data, as ready to say that the expected asymmetry is not there.

Everything here takes `Importance.to_dict()` (or a recorded one) and returns plain text; whoever shows it escapes it.
"""

import math
import statistics

from .importance import STAGES, kl_at, ratios, recommended, skipped_share, third_ratios, total
from .units import count, date, duration, percent, times

FEW_SAMPLES = 8
NOISE_KL = 1e-6  # a divergence below this is what float32 makes of nothing
LEAN = 1.1  # a depth contrast closer to 1 than this is called no change
ALIKE, BROADLY = 0.8, 0.5  # rank correlations from which two orders are called nearly alike, or alike broadly


def layers_sentence(result: dict, cutoff: int | None) -> str:
    """Under the layers: what the layers from the cutoff up carry (the last third without one), and what depth does."""
    layers = result["layers"]
    unknown = unknown_layers(layers)
    if unknown:
        return f"{_unknown(unknown)}, so shares of the whole are not known."
    if not all(math.isfinite(_sum(layers, stage)) for stage in STAGES):
        return "The values are too large to be added up, so shares of the whole are not known."
    missing = [word for stage, word in zip(STAGES, ("reading", "writing"), strict=True) if not _sum(layers, stage)]
    if missing:
        return f"Every layer's importance for {' and for '.join(missing)} is exactly 0, so there is nothing to compare."
    parts = [_carried(layers, cutoff), _depth(layers)]
    if len(layers) > 1 and not total(layers[-1], "prefill"):
        parts.append(
            f"The last layer, {len(layers) - 1}, has a reading importance of exactly 0: later tokens see only its keys "
            f"and values, which are made before the layer does its work."
        )
    return " ".join(part for part in parts if part)


def _carried(layers: list[dict], cutoff: int | None) -> str:
    """The shares of the layers from the cutoff up."""
    last = len(layers) - 1
    if not last:
        return "The model has a single layer, so there is no depth to compare."
    third = len(layers) - max(1, len(layers) // 3)
    free = cutoff is None or cutoff > last  # nothing is cut off: look at the last third
    start = third if free else max(0, cutoff)
    named = f"layer {last}" if start == last else f"layers {start}-{last}"
    part = "third" if len(layers) > 2 else "half"
    who = f"The last {part}, {named}," if free else named.capitalize()
    read, wrote = (_sum(layers[start:], stage) / _sum(layers, stage) for stage in STAGES)
    verb = "carries" if free or start == last else "carry"
    said = f"{who} {verb} {percent(read)} of the reading importance and {percent(wrote)} of the writing importance"
    if start == 0:
        return f"{said}: they are the whole model."
    if read > wrote:
        return f"{said}: here deep layers matter more to reading than to writing, against what pruning them hopes for."
    return f"{said}." if read < wrote else f"{said}: no difference between reading and writing."


def _depth(layers: list[dict]) -> str:
    """How the writing/reading ratio of the last third compares with the first."""
    first, last = third_ratios(layers)
    if len(layers) < 3 or not first or last is None:
        return ""
    pair = f"is {plain(last)} in the last third and {plain(first)} in the first"
    infinite = [layer for layer, ratio in enumerate(ratios(layers)) if ratio == math.inf]
    apart = f", infinite ratios left out ({_listed(infinite)})" if infinite else ""
    contrast = last / first
    if contrast >= LEAN:
        return f"Deep layers lean towards writing: the mean writing/reading ratio {pair}{apart}."
    if contrast > 1 / LEAN:
        return f"Depth makes little difference: the mean writing/reading ratio {pair}{apart}."
    return f"Deep layers do not lean towards writing, the first do: the mean writing/reading ratio {pair}{apart}."


def curve_sentence(result: dict, cutoff: int | None, tolerance: float, speedup: float | None, tokens: int) -> str:
    """Under the curve: what a cutoff skips, may gain and really cost, and whether it is the recommended one."""
    layers = result["layers"]
    last, shares, best = len(layers) - 1, skipped_share(layers), recommended(result, tolerance)
    if best is None:
        advice = f"No cutoff is recommended: {why_no_shares(layers)}."
    elif shares[best - 1] <= tolerance and best > 1:
        advice = f"Cutoff {best} is the lowest that a prompt with pictures can have (DeepStack)"
        advice += f", and it skips {percent(shares[best])} of the reading importance."
    else:
        advice = f"Cutoff {best} is the lowest that skips at most {percent(tolerance)} of the reading importance"
        advice += f": it skips {percent(shares[best])}." if cutoff in (None, best) else "."
    if cutoff is None:
        return advice
    if cutoff > last:
        kept = f"Cutoff {cutoff} keeps all {count(len(layers), 'layer')} for reading: nothing is skipped or changed."
        return kept if best == cutoff else f"{kept} {advice}"
    gain, cost = "", _cost(result, cutoff)
    if speedup is not None:
        gain = f"arithmetic predicts a prefill {times(speedup)} as fast at {count(tokens, 'token')}, and "
    if best is None:
        return f"{advice} For cutoff {cutoff}, {gain}{cost}."
    effect = f"{gain}{cost}."
    effect = effect[0].upper() + effect[1:]
    if cutoff == best:
        return f"{advice} {effect}"
    side = "above" if shares[cutoff] > tolerance else "within"
    skips = f"Cutoff {cutoff} skips {percent(shares[cutoff])} of the reading importance, {side} the tolerance."
    return f"{skips} {effect} {advice}"


def _cost(result: dict, cutoff: int) -> str:
    """What a cutoff was measured to change, as a clause about "it"."""
    measured = [entry["cutoff"] for entry in result["cut_kl"]]
    if cutoff not in measured:
        known = f" (cutoffs {min(measured)} to {max(measured)} were)" if measured else ""
        return f"what it really costs was not measured{known}"
    kl, how = kl_at(result["cut_kl"], cutoff), f"own projections on {count(result['cut_samples'], 'sample')}"
    if kl is None:
        return f"its KL, measured with {how}, is not a finite number"
    cost = f"{plain(kl)} nats of KL per written token" if kl > NOISE_KL else "no KL beyond rounding errors"
    return f"it cost {cost}, measured with {how}"


def why_no_shares(layers: list[dict]) -> str:
    """The reason that `skipped_share` is None, as the rest of a sentence."""
    unknown = [entry["layer"] for entry in layers if total(entry, "prefill") is None]
    if unknown:
        return f"the reading importance of {_listed(unknown)} is not a finite number, so shares are not known"
    if _sum(layers, "prefill"):
        return "the reading importances are too large to be added up, so shares are not known"
    return "every layer's reading importance is exactly 0, so there are no shares"


def ablation_sentence(result: dict) -> str:
    """Under the ablation: how well the gates, and ShortGPT's block influence, foretell it."""
    ablation = result["ablation"]
    if not ablation:
        if result["stopped_in"]:
            return "Stopped before layers were really left out, so the gates are not held against that here."
        return (
            "What really leaving out each layer does was not measured: set “Really leave out each layer” under "
            "Advanced (--ablation on the command line) to a few samples, and run again."
        )
    over = f"{count(len(result['layers']), 'layer')}, {count(ablation['samples'], 'sample')}"
    gates = [result["spearman_prefill"], result["spearman_decode"]]
    influence = [ablation["spearman"][f"influence_ablation_{stage}"] for stage in STAGES]
    known = any(value is not None for value in gates + influence)
    note = " 1 is the same order and 0 no relation." if known else " Too few layers, equal or unknown values: no ranks."
    return (
        f"Each layer was also really left out, alone ({over}). The gates and this real effect {_agreement(gates)}. "
        f"A simpler measure, ShortGPT's block influence, and the real effect {_agreement(influence)}.{note}"
    )


def _agreement(values: list[float | None]) -> str:
    """Two Spearman correlations, reading and writing, as the rest of a sentence."""
    verdicts = [_verdict(value) for value in values]
    shown = ["n/a" if value is None else f"{value:.2f}" for value in values]
    if verdicts[0] == verdicts[1]:
        return f"{verdicts[0]} for reading (Spearman {shown[0]}) and for writing ({shown[1]})"
    return f"{verdicts[0]} for reading (Spearman {shown[0]}) and {verdicts[1]} for writing ({shown[1]})"


def _verdict(value: float | None) -> str:
    if value is None:
        return "cannot be compared"
    if value >= ALIKE:
        return "rank the layers nearly alike"
    return "agree broadly" if value >= BROADLY else "do not agree well"


def caption(result: dict) -> str:
    """Whose numbers these are, for the line above the figures."""
    tokens = f"{result['prompt_tokens']} + {result['new_tokens']} tokens"
    if result.get("image_tokens"):
        tokens = f"about {tokens}, {result['image_tokens']:,.0f} of them of pictures"
    return f"{result['model']}: {_done(result)} of {tokens}, {date(result['date'])}, {result['machine']}"


def ending(result: dict) -> str:
    """How an analysis ended, for the line of its status."""
    if result["complete"]:
        return f"Done: your own analysis of {result['model']}, made just now"
    done = count(result["samples"], "sample")
    if result["stopped_in"] == "cutoffs":
        return f"Stopped: the gates are those of all {done}, what a cutoff costs is not measured on all it should be"
    if result["stopped_in"] == "ablation":
        on = result["ablation"]["samples"] if result["ablation"] else 0
        return f"Stopped: the gates are those of all {done}, ablation is on {count(on, 'sample')}"
    return f"Stopped: the result is that of {result['samples']:,} of {count(result['requested'], 'sample')}"


def _done(result: dict) -> str:
    """How many samples, and of how many if it was stopped before."""
    if result["samples"] == result["requested"]:
        return count(result["samples"], "sample")
    return f"{result['samples']:,} of {count(result['requested'], 'sample')}"


def facts(result: dict) -> list[tuple[str, str]]:
    """What was analysed and on what, as (name, value)."""
    done = _done(result)
    if not result["complete"]:
        done += f", stopped in the phase of the {result['stopped_in']}"
    loss, cost = result["loss"], result["forward_equivalents"]
    spent = duration(result["seconds"])
    ablation = result["ablation"]
    lines = [
        ("Model", result["model"]),
        ("Text", result["text"] or "not named"),
        ("Samples", done),
        _length(result),
        ("Loss of the drawn labels", "n/a" if not _finite(loss) else f"{loss:.2f} nats a token"),
        ("Cost", spent if cost is None else f"{plain(cost)} plain forwards a sample, {spent}"),
        ("Layers computed again on the way back", "yes, to save memory" if result["recompute"] else "no"),
        ("Device", f"{result['machine']} ({result['device']}), {result['dtype']}"),
        ("Date", date(result["date"])),
        ("Seed", str(result["seed"])),
    ]
    if ablation:
        lines.insert(6, ("Ablation", f"{count(ablation['samples'], 'sample')}, {duration(ablation['seconds'])}"))
    return lines


def _length(result: dict) -> tuple[str, str]:
    length = f"{count(result['prompt_tokens'], 'prompt token')}, {result['new_tokens']:,} written"
    if not result.get("image_tokens"):
        return "Length of each", length
    return "Mean length", f"{length}; of the prompt {count(round(result['image_tokens']), 'image token')}"


def uncertain(result: dict) -> str:
    """How rough the numbers are, or nothing where they are not."""
    samples = result["samples"]
    if samples < 2:
        return "With 1 sample the numbers are rough, and there is no telling how rough."
    if result.get("distinct") == 1:
        return f"All {samples:,} samples are one prompt, each with labels of its own: this is about that prompt alone."
    pairs = [(total(entry, stage), entry[f"{stage}_se"]) for entry in result["layers"] for stage in STAGES]
    shares = [error / value for value, error in pairs if value and error is not None]
    typical = statistics.median(shares) if shares else None
    wide = typical is not None and typical > 0.5  # of more than half of the layers
    if samples >= FEW_SAMPLES and not wide:
        return ""
    rough = f"With {samples} samples the numbers are rough"
    return rough + ("." if typical is None else f": the standard error is typically {typical:.0%} of a layer's value.")


def unknown_layers(layers: list[dict]) -> list[int]:
    """The layers with a value that is not finite."""
    return [entry["layer"] for entry in layers if None in (total(entry, stage) for stage in STAGES)]


def plain(value: float) -> str:
    """A positive number in two or three figures, without exponents where people would not write them."""
    if not value:
        return "0"
    if value >= 1e6 or value < 1e-3:
        return f"{value:.1e}"
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _sum(layers: list[dict], stage: str) -> float:
    return sum(total(entry, stage) for entry in layers)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _listed(layers: list[int]) -> str:
    """`layer 3`, `layers 3 and 4`, `layers 3, 4, 5 and 9 more`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 4:
        return f"layers {', '.join(map(str, layers[:3]))} and {len(layers) - 3} more"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]}"


def _unknown(layers: list[int]) -> str:
    which = _listed(layers).capitalize()
    if len(layers) > 1:
        return f"{which} have values that are not finite numbers"
    return f"{which} has a value that is not a finite number"
