"""Results in words: one plain sentence for every figure, generated from the data and as ready to say that pruning lost.

Everything here takes `Comparison.to_dict()` (or a recorded one) and returns plain text; whoever shows it escapes it.
"""

from . import channel_words
from .channel_words import NOISE
from .forecast import Forecast
from .units import count, date, duration, gigabytes, milliseconds, small, times

__all__ = [
    "before_reading_ms",
    "count",
    "date",
    "difference_sentence",
    "duration",
    "facts",
    "first_token_ms",
    "gigabytes",
    "milliseconds",
    "picture_facts",
    "picture_words",
    "plan_sentence",
    "tiles",
    "times",
    "timing_sentence",
    "tokenising_ms",
]

ODD_STEP = 0.1  # where writing leaves nothing out, a step time ratio further from 1 is remarked on
UNSTEADY = 1.5  # a slowest repeat this many times the fastest is remarked on
SHORT_PROMPT = 64  # tokens below which fixed costs hide what is saved


def before_reading_ms(run: dict) -> float:
    """The part of the wait for the first token that comes before the prefill, 0 for a run that was stopped before."""
    return max(0.0, run["ttft_ms"] - run["prefill_ms"])


def tokenising_ms(run: dict) -> float:
    """What of that goes to the text, and to scaling the pictures: all but the vision tower's part."""
    return max(0.0, before_reading_ms(run) - run.get("vision_ms", 0.0))


def first_token_ms(result: dict, name: str) -> float | None:
    """The median wait for the first token of "dense" or "pruned", with tokenising and the vision tower."""
    prefill = result[f"{name}_prefill_ms"]
    return None if prefill is None else prefill + before_reading_ms(result[name])


def plan_sentence(seen: Forecast) -> str:
    """What the cutoff and the prune ratio do, for the line beside their sliders."""
    return f"{_cutoff_sentence(seen)} {channel_words.plan_sentence(seen.channels)}"


def _cutoff_sentence(seen: Forecast) -> str:
    if seen.cutoff >= seen.layers:
        return f"Skips nothing: all {count(seen.layers, 'layer')} read the prompt, as in the dense model."
    if not seen.skipped:
        tokens = count(seen.tokens, "token")
        return f"Skips nothing: all {tokens} of this prompt are sinks or boundary and run every layer."
    about = "an assumed " if seen.assumed else ""
    what = f"Skips {seen.skipped} of {seen.layers} layers for the prompt, keeps all {seen.layers} for the answer"
    if seen.speedup is None:
        return f"{what}; the predicted speed-up appears once the model is loaded."
    return f"{what}; predicted prefill {times(seen.speedup)} at {about}{count(seen.tokens, 'prompt token')}."


def picture_words(fact: dict) -> str:
    """The size of a picture, what the model is given of it, and its tokens, as far as they are known."""
    said = [f"{fact['width']:,} × {fact['height']:,} pixels"]
    if "tokens" in fact:
        if (fact["seen_width"], fact["seen_height"]) != (fact["width"], fact["height"]):
            said.append(f"seen at {fact['seen_width']:,} × {fact['seen_height']:,}")
        said.append(count(fact["tokens"], "token"))
    return ", ".join(said)


def picture_facts(run: dict) -> list[tuple[str, str]]:
    """The pictures of a run, their tokens and the vision tower's time, as (name, value); nothing without pictures."""
    shown = run.get("pictures") or ()
    if not shown:
        return []
    sizes = dict.fromkeys(picture_words(fact) for fact in shown)
    each = f"{len(shown)}, each " if len(shown) > len(sizes) == 1 else f"{len(shown)}: " if len(shown) > 1 else ""
    return [
        ("Pictures", each + "; ".join(sizes if len(sizes) == 1 else map(picture_words, shown))),
        ("Image tokens", f"{run['image_tokens']:,} of {count(run['prompt_tokens'], 'prompt token')}"),
        ("Vision tower", f"{milliseconds(run['vision_ms'])} of the first token's time"),
    ]


def timing_sentence(result: dict) -> str:
    """Under the bars: who was faster at what, by how much, and how far to trust it."""
    spreads = (result[f"{name}_prefill_spread"] for name in ("dense", "pruned"))
    unsteady = any(spread and spread[1] > UNSTEADY * spread[0] for spread in spreads)
    doubt = " The repeats vary a lot, as on a busy machine, so trust these times little." if unsteady else ""
    dense, pruned = result["dense"], result["pruned"]
    said = [_reading(result), _seeing(dense), _writing(result), channel_words.choosing_sentence(pruned)]
    return " ".join(filter(None, said)) + doubt


def _reading(result: dict) -> str:
    dense, pruned, speedup = *(first_token_ms(result, name) for name in ("dense", "pruned")), result["prefill_speedup"]
    if dense is None or pruned is None:
        return "Stopped before both runs had read the prompt, so there is nothing to compare."
    nothing, channels = not result["pruned"]["skipped_layers"], result["pruned"]["channels"]
    if nothing and not (channels and channels["scoring_ms"]):
        return "Nothing was skipped, so both runs read the prompt alike and any difference is noise of the machine."
    pair = f"first token after {milliseconds(dense)} dense, {milliseconds(pruned)} pruned"
    if speedup is None:
        return f"The reading was timed only once ({pair}), without repeats, so no speed-up is claimed."
    rounds = count(result["prefill_repeats"], "paired repeat")
    if not result["complete"]:
        rounds += ", stopped early"
    if nothing:
        return channel_words.reading_sentence(speedup, f"{pair}; {rounds}")
    limit = f"arithmetic alone predicts {times(result['predicted_speedup'])}"
    if speedup > 1 + NOISE:
        return f"Pruning reads the prompt {times(speedup)} as fast ({pair}; {rounds}); {limit}."
    short = result["pruned"]["prompt_tokens"] < SHORT_PROMPT
    why = f", as a prompt of {result['pruned']['prompt_tokens']} tokens leaves little to save" if short else ""
    if speedup >= 1 - NOISE:
        return f"Pruning makes no measurable difference to reading ({pair}; {rounds}){why}; {limit}."
    return f"Pruning loses: it reads at {times(speedup)} the speed of dense ({pair}; {rounds}){why}; {limit}."


def _seeing(run: dict) -> str:
    """The vision tower's part, where there are pictures."""
    shown = run.get("pictures") or ()
    if not shown:
        return ""
    which = "the picture" if len(shown) == 1 else f"the {len(shown)} pictures"
    return (
        f"The vision tower looked at {which} once for both, in {milliseconds(run['vision_ms'])}: part of the wait for "
        "the first token, not of the reading that is compared."
    )


def _writing(result: dict) -> str:
    speedup, steps = result["decode_speedup"], result["paired_steps"]
    if speedup is None:
        return f"Too few tokens were written by both to time the writing ({count(steps, 'step')})."
    if result["pruned"]["removed_share"]:
        return channel_words.writing_sentence(result)
    pair = f"{milliseconds(result['dense_step_ms'])} and {milliseconds(result['pruned_step_ms'])} per token"
    if abs(speedup - 1) <= ODD_STEP:
        return f"Writing uses all layers in both, and takes the same time ({pair})."
    return f"Writing uses all layers in both, so its difference ({pair}) is noise of the machine."


def difference_sentence(result: dict) -> str:
    """Under the answers: where they part, and how often the pruned model agrees along the dense answer."""
    dense, pruned, at = result["dense"], result["pruned"], result["first_divergence"]
    length = count(len(dense["tokens"]), "token")
    if not dense["tokens"] and not pruned["tokens"]:
        stopped = "cancelled" in (dense["stop"], pruned["stop"])
        return "Stopped before anything was written." if stopped else "Both answers are empty: the model ended at once."
    if at is None:
        said = f"Both answers are the same, {length} long."
    else:
        said = f"The answers part at token {at + 1} (the dense one has {len(dense['tokens'])})."
    if dense["sampling"]["temperature"]:
        said += " They were drawn at random with the same seed, so one changed probability can change all that follows."
    if result["agreement"] is None:
        return f"{said} Stopped before their agreement was measured."
    return (
        f"{said} Given the dense answer so far, the pruned model's best next token is the same in "
        f"{result['agreement']:.0%} of the places."
    )


def tiles(result: dict) -> list[tuple[str, str, str]]:
    """The four numbers of a comparison as (label, value, note)."""
    at, kl = result["first_divergence"], result["first_token_kl"]
    agreement = result["agreement"]
    written = max(len(result["dense"]["tokens"]), len(result["pruned"]["tokens"]))
    pruned, divergence = result["pruned"], "n/a" if kl is None else small(kl)
    speedup = times(result["prefill_speedup"]), f"{times(result['predicted_speedup'])} predicted"
    if not pruned["skipped_layers"]:
        speedup = (speedup[0], "all layers read") if pruned["channels"] else ("n/a", "nothing was skipped")
    second = "First token KL", divergence, "nats; 0 is identical"
    if pruned["removed_share"]:
        limit = times(result["predicted_decode_speedup"])
        second = "Writing speed-up", times(result["decode_speedup"]), f"{limit} at most"
    return [
        ("Prefill speed-up", *speedup),
        ("Agreement", "n/a" if agreement is None else f"{agreement:.0%}", "same best token"),
        second,
        ("First difference", "none" if at is None else f"token {at + 1}", f"of {count(written, 'token')}"),
    ]


def facts(result: dict) -> list[tuple[str, str]]:
    """What was run and on what, as (name, value)."""
    dense, pruned = result["dense"], result["pruned"]
    skipped, full = pruned["skipped_layers"], pruned["full_tokens"]
    cut = pruned["plan"]["prefill"]
    how = f"{cut['kv']} projections, {count(cut['sinks'], 'sink')}, boundary {cut['boundary']}" if skipped else "none"
    first = "n/a" if result["first_token_kl"] is None else f"{small(result['first_token_kl'])} nats"
    before, reading = "Tokenising", []
    if dense.get("pictures"):
        before = "Tokenising, scaling pictures"
        times_of = (milliseconds(result[f"{name}_prefill_ms"]) for name in ("dense", "pruned"))
        reading = [("Reading without vision", "{} dense, {} pruned".format(*times_of))]
    return [
        ("Model", dense["model"]),
        ("Prompt", f"{count(dense['prompt_tokens'], 'token')}, {'chat template' if dense['chat'] else 'plain'}"),
        *picture_facts(dense),
        *reading,
        ("Skipped while reading", f"{skipped} of {pruned['layers']} layers"),
        ("Tokens that ran every layer", f"{full:,} of {pruned['prompt_tokens']:,}"),
        ("Keys and values of skipped layers", how),
        *channel_words.facts(pruned),
        ("Written", f"{len(dense['tokens'])} dense, {len(pruned['tokens'])} pruned"),
        ("KL of the first token", first),
        ("KL along the dense answer", "n/a" if result["kl"] is None else f"{small(result['kl'])} nats per token"),
        (before, f"{milliseconds(tokenising_ms(dense))} of the first token's time"),
        ("Device", f"{result['machine']}, {dense['dtype']}"),
        ("Date", date(result["date"])),
    ]
