"""What a plan will do to a prompt, before anything runs: plain data for the sentence beside the cutoff slider."""

from dataclasses import dataclass

from .costs import prefill_limit
from .errors import PopError
from .families import DecoderSpec
from .plan import FITTED, Plan, PrefillCut

ASSUMED_TOKENS = 512  # of a prompt that no tokenizer has seen yet
SHARE = 2 / 3  # of the layers, kept by default


@dataclass(frozen=True)
class Forecast:
    """kept, skipped: of `layers`, while reading. tokens: of the prompt, `assumed` where it was not tokenised.

    cutoff: what was asked for; all layers are kept when the prompt is nothing but sinks and boundary. speedup: of the
    prefill over dense by arithmetic alone, None while the model's shape is unknown.
    """

    layers: int
    cutoff: int
    kept: int
    skipped: int
    tokens: int
    assumed: bool
    speedup: float | None


def forecast(plan: Plan, layers: int, tokens: int | None = None, spec: DecoderSpec | None = None) -> Forecast:
    """The forecast of a plan for a prompt of `tokens` tokens. Raises `PopError` when the plan does not fit `layers`."""
    plan.check(layers)
    cut, known = plan.prefill, tokens is not None
    tokens = tokens if known else ASSUMED_TOKENS
    cutoff = cut.cutoff if cut else layers
    kept = layers if cut and cut.sinks + cut.boundary >= tokens else cutoff
    return Forecast(
        layers=layers,
        cutoff=cutoff,
        kept=kept,
        skipped=layers - kept,
        tokens=tokens,
        assumed=not known,
        speedup=prefill_limit(spec, tokens, plan) if spec else None,
    )


def token_count(engine, text: str, chat: bool | None = None) -> int | None:
    """Tokens of a prompt as the engine would read it, or None when it would not."""
    from .text import encode_prompt  # here: a forecast without an engine needs no tokenizer

    try:
        return len(encode_prompt(engine.loaded.tokenizer, text, chat).ids)
    except PopError:
        return None


def default_plan(layers: int) -> Plan:
    """What the page starts with: a third of the layers skipped, fitted projections, 4 sinks, a boundary of 16."""
    return Plan(PrefillCut(max(1, round(layers * SHARE)), FITTED, sinks=4, boundary=16))
