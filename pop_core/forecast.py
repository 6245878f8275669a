"""What a plan will do to a prompt and its answer, before anything runs: data for the words beside the controls."""

from dataclasses import dataclass

from . import costs
from .errors import PopError
from .families import DecoderSpec
from .plan import ALL, FITTED, Budget, ChannelPruning, Plan, PrefillCut

ASSUMED_TOKENS = 512  # of a prompt that no tokenizer has seen yet
SHARE = 2 / 3  # of the layers, kept by default


@dataclass(frozen=True)
class ChannelForecast:
    """ratio: what was asked for. budgets: for each kind of FFN its name, its channels, and what becomes of them; empty
    while the model's shape is unknown, as are the numbers that follow.

    pruned_layers: of `layers`, those whose FFNs lose channels; the others stay whole, as no prompt token runs them.
    mixture: experts that the prompt will not reach stay whole too. removed_share: of the whole model, at most. speedup:
    of a step over dense by the bytes that it reads, at most.
    """

    ratio: float
    budgets: tuple[tuple[str, int, Budget], ...] = ()
    layers: int | None = None
    pruned_layers: int | None = None
    mixture: bool = False
    removed_share: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Forecast:
    """kept, skipped: of `layers`, while reading. tokens: of the prompt, `assumed` where it was not tokenised.

    cutoff: what was asked for; all layers are kept when the prompt is nothing but sinks and boundary. speedup: of the
    prefill over dense by arithmetic alone, None while the model's shape is unknown. channels: None when all of them
    write.
    """

    layers: int
    cutoff: int
    kept: int
    skipped: int
    tokens: int
    assumed: bool
    speedup: float | None
    channels: ChannelForecast | None = None


def forecast(plan: Plan, layers: int, tokens: int | None = None, spec: DecoderSpec | None = None) -> Forecast:
    """The forecast of a plan for a prompt of `tokens` tokens. Raises `PopError` when the plan does not fit `layers`."""
    plan.check(layers)
    cut, known = plan.prefill, tokens is not None
    tokens = tokens if known else ASSUMED_TOKENS
    cutoff = cut.cutoff if cut else layers
    kept = layers if cut and cut.sinks + cut.boundary >= tokens else cutoff
    unread = cut is not None and not cut.sinks + cut.boundary  # no token runs the layers from the cutoff up
    return Forecast(
        layers=layers,
        cutoff=cutoff,
        kept=kept,
        skipped=layers - kept,
        tokens=tokens,
        assumed=not known,
        speedup=costs.prefill_limit(spec, tokens, plan) if spec else None,
        channels=_channels(plan.online, kept if unread else layers, tokens, spec) if plan.online else None,
    )


def _channels(pruning: ChannelPruning, scored: int, tokens: int, spec: DecoderSpec | None) -> ChannelForecast:
    """scored: layers that some prompt token runs."""
    if spec is None:
        return ChannelForecast(pruning.ratio)
    whole = pruning.rescore != ALL  # what stays so without a prompt token to score it
    kinds = {"FFN": spec.ffn} if len(spec.sparse) < spec.layers else {}
    if spec.sparse:
        kinds |= {"expert": spec.expert_ffn} | ({"shared expert": spec.shared_ffn} if spec.shared_ffn else {})
    return ChannelForecast(
        ratio=pruning.ratio,
        budgets=tuple((kind, width, pruning.budget(width)) for kind, width in kinds.items()),
        layers=spec.layers,
        pruned_layers=scored if whole else spec.layers,
        mixture=bool(spec.sparse) and whole,
        removed_share=costs.removed_share(spec, pruning.ratio),
        speedup=costs.decode_limit(spec, tokens, pruning, itemsize=1),  # the size of a number cancels out
    )


def token_count(engine, text: str, chat: bool | None = None) -> int | None:
    """Tokens of a prompt without pictures as the engine would read it, or None when it would not."""
    from .text import encode_prompt  # here: a forecast without an engine needs no tokenizer

    try:
        return len(encode_prompt(engine.loaded.tokenizer, text, chat).ids)
    except PopError:
        return None


def default_plan(layers: int) -> Plan:
    """What the page starts with: a third of the layers skipped, fitted projections, 4 sinks, a boundary of 16."""
    return Plan(PrefillCut(max(1, round(layers * SHARE)), FITTED, sinks=4, boundary=16))
