"""A page's settings as a URL query: written for sharing, read and checked when a page opens."""

from urllib.parse import urlencode

from pop_core.errors import PopError
from pop_core.plan import PrefillCut

from .shared import DEFAULT_MODEL, allowed_name

KEYS = ("model", "cutoff", "kv", "sinks", "boundary")


def to_query(model: str, cut: dict) -> str:
    """The query that `read_query` turns into the same settings; what `cut` leaves out becomes the default."""
    return "?" + urlencode({"model": model, **{key: cut[key] for key in KEYS[1:] if key in cut}})


def read_query(parameters: dict, default: PrefillCut) -> tuple[str, PrefillCut, str]:
    """(model, cut, sentence) of a URL's parameters. What cannot be used becomes the default, and the sentence says so.

    The cutoff is checked against the model's layers when the model is there.
    """
    model, problem = read_model(parameters)
    problems = [problem] if problem else []
    values = {key: getattr(default, key) for key in KEYS[1:]}
    for key in KEYS[1:]:
        if key in parameters:
            try:
                cut = PrefillCut(**{"cutoff": 1, key: parameters[key]})
                values[key] = getattr(cut, key)
            except PopError as error:
                problems.append(str(error))
    sentence = f"The link has settings that cannot be used, so defaults took their place. {' '.join(problems)}"
    return model, PrefillCut(**values), sentence if problems else ""


def read_model(parameters: dict) -> tuple[str, str]:
    """(model, sentence) of a URL's parameters: the default and why, if the link's cannot be used."""
    try:
        return allowed_name(parameters.get("model") or DEFAULT_MODEL)[:300], ""
    except PopError as error:
        return DEFAULT_MODEL, str(error)
