"""A page's settings as a URL query: written for sharing, read and checked when a page opens."""

from urllib.parse import urlencode

from pop_core.errors import PopError
from pop_core.plan import CANDIDATES, NONE, WIDTH, ChannelPruning, Plan, PrefillCut

from .controls import read_channels
from .shared import DEFAULT_MODEL, allowed_name

CUT, CHANNELS = ("cutoff", "kv", "sinks", "boundary"), ("ratio", "width", "rescore")
KEYS = ("model", *CUT, *CHANNELS)
OFF = {"ratio": 0, "width": WIDTH, "rescore": CANDIDATES}


def to_query(model: str, settings: dict) -> str:
    """The query that `read_query` turns into the same settings; what `settings` leaves out becomes the default."""
    return "?" + urlencode({"model": model, **{key: settings[key] for key in KEYS[1:] if key in settings}})


def read_query(parameters: dict, default: PrefillCut, ratio: float = 0) -> tuple[str, Plan, str]:
    """(model, plan, sentence) of a URL's parameters. What cannot be used becomes the default, and the sentence says so.

    default, ratio: the page's own cut and prune ratio. The cutoff is checked against the model's layers when the model
    is there.
    """
    model, problem = read_model(parameters)
    problems = [problem] if problem else []

    def read(keys, defaults: dict, part) -> dict:
        """Each key for itself; part: makes a part of the plan from one of them."""
        values = dict(defaults)
        for key in set(keys) & set(parameters):
            try:
                values[key] = getattr(part({key: parameters[key]}), key)
            except PopError as error:
                problems.append(str(error))
        return values

    cut = read(CUT, vars(default), lambda one: PrefillCut(**({"cutoff": 1} | one)))
    # without re-scoring no width is too wide for a ratio
    defaults = OFF | {"ratio": ratio}
    channels = read(CHANNELS, defaults, lambda one: ChannelPruning(**({"ratio": 0, "rescore": NONE} | one)))
    for key in ("width", "ratio"):  # the first defaults that make them fit together
        try:
            read_channels(**channels)
            break
        except PopError as error:
            problems.append(str(error))
            channels[key] = defaults[key]
    sentence = f"The link has settings that cannot be used, so defaults took their place. {' '.join(problems)}"
    return model, Plan(PrefillCut(**cut), read_channels(**channels)), sentence if problems else ""


def read_model(parameters: dict) -> tuple[str, str]:
    """(model, sentence) of a URL's parameters: the default and why, if the link's cannot be used."""
    try:
        return allowed_name(parameters.get("model") or DEFAULT_MODEL)[:300], ""
    except PopError as error:
        return DEFAULT_MODEL, str(error)
