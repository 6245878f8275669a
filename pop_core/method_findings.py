"""The methods of a study in words: how close to dense, how fast, and who wins, which need not be ours.

Everything here takes `Study.to_dict()` (or a recorded one) and returns plain text; whoever shows it escapes it.
"""

import math

from .channel_view import DENSE, OURS, pruning, row
from .findings import plain
from .plan import ALL, CANDIDATES, NONE
from .sentences import NOISE, UNSTEADY, count, milliseconds, times

SAME_SHARE = 0.005  # two methods that leave out shares no further apart stand at the same cost


def quality_sentence(result: dict) -> str:
    """Under the quality: whether choosing by token is closer to dense than a fixed mask, and who is closest."""
    ours = row(result, OURS)
    if ours["kl"] is None:
        return "Stopped before the predictions were compared, so no closeness to the dense model is known."
    if result["tokens"] < 2:
        return "The dense answer has one token, which comes from the prompt: nothing was written, so nothing differs."
    over = count(result["tokens"], "token")
    said = [
        f"Along the {over} of the dense answer, {ours['title']} is {plain(ours['kl'])} nats of KL a token from dense "
        f"and has the same best token in {ours['agreement']:.0%} of the places."
    ]
    fixed = row(result, NONE)
    if fixed and fixed["kl"] is not None and pruning(result)["rescore"] == CANDIDATES:
        said.append(_against_fixed(ours["kl"], fixed["kl"]))
    rivals = [entry for entry in at_same_cost(result) if entry["kl"] is not None]
    if len(rivals) > 1:
        best = min(rivals, key=lambda entry: entry["kl"])
        who = f"{best['title']} is closest" if best is not ours else f"{ours['title']} is the closest"
        said.append(f"Of the {len(rivals)} methods that leave channels or layers unread, {who} ({plain(best['kl'])}).")
        shares = [entry["removed_share"] for entry in rivals]
        if max(shares) - min(shares) > SAME_SHARE:
            said.append(f"They do not leave out quite the same: {min(shares):.1%} to {max(shares):.1%} of the model.")
    said.append("This is one prompt and one answer; another may look different.")
    return " ".join(said)


def _against_fixed(ours: float, fixed: float) -> str:
    pair = f"({plain(ours)} against {plain(fixed)})"
    if abs(ours - fixed) <= NOISE * max(ours, fixed):
        return f"Choosing by token makes no difference to a fixed mask {pair}."
    if ours < fixed:
        return f"That is closer than a fixed mask {pair}."
    return f"Choosing by token loses: a fixed mask is closer {pair}."


def at_same_cost(result: dict) -> list[dict]:
    """The methods that read fewer weights: all but the dense one and the one that scores everything again."""
    ours_reads_all = pruning(result)["rescore"] == ALL
    return [
        entry
        for entry in result["methods"]
        if entry["name"] not in (DENSE, ALL) and not (entry["name"] == OURS and ours_reads_all)
    ]


def speed_sentence(result: dict, limit: float | None = None) -> str:
    """Under the times: whether writing got faster, when the prompt's partition is made good, and who is fastest.

    limit: the speed-up that reading fewer weights allows, where it is known."""
    ours, dense = row(result, OURS), row(result, DENSE)
    if ours["step_ms"] is None or dense["step_ms"] is None:
        return "The steps were not timed, so no speed is claimed."
    ratio = dense["step_ms"] / ours["step_ms"]
    pair = f"{milliseconds(ours['step_ms'])} against {milliseconds(dense['step_ms'])} a token"
    pair += f"; {count(result['rounds'], 'paired step')}"
    bound = "" if limit is None else f"; reading fewer weights allows at most {times(limit)}"
    if limit is not None and ratio > limit * (1 + NOISE):
        bound += ", so the rest is noise of the machine"
    if ratio > 1 + NOISE:
        said = [f"{ours['title']} writes {times(ratio)} as fast as dense ({pair}){bound}."]
    elif ratio >= 1 - NOISE:
        said = [f"{ours['title']} makes no measurable difference to the speed of writing ({pair}){bound}."]
    else:
        said = [f"Pruning loses: {ours['title']} writes at {times(ratio)} the speed of dense ({pair}){bound}."]
    said.append(_made_good(ours, dense))
    rivals = [entry for entry in result["methods"] if entry["step_ms"] is not None]
    best = min(rivals, key=lambda entry: entry["step_ms"])
    if len(rivals) > 2 and best is not ours:
        said.append(f"{best['title']} is the fastest here ({milliseconds(best['step_ms'])}).")
    if any(entry["step_spread"] and entry["step_spread"][1] > UNSTEADY * entry["step_spread"][0] for entry in rivals):
        said.append("The steps vary a lot, as on a busy machine, so trust these times little.")
    return " ".join(filter(None, said))


def _made_good(ours: dict, dense: dict) -> str:
    """When the work that is done once for the prompt has paid."""
    once, gain = ours["partition_ms"], dense["step_ms"] - ours["step_ms"]
    if not once:
        return ""
    cost = f"Scoring and slicing took {milliseconds(once)}, once for the prompt"
    if gain <= 0:
        return f"{cost}, which no answer makes good."
    return f"{cost}, made good after {count(math.ceil(once / gain), 'token')}."
