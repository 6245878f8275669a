"""What came of one run, as plain data: it can be recorded, exported, shared and sent between processes."""

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Run:
    """One answer and how it came about. All times are wall-clock milliseconds.

    prefill_ms: from the embedding to the first token, filling of caches and projections included. ttft_ms: from the
    request to the first token, so tokenisation, vision and allocation too. image_tokens: of the prompt's. vision_ms: of
    the vision tower. pictures: as in `vision.Pixels.facts`. step_ms: each decode step. stop: "end" (the model
    ended its answer), "stop" (a stop string), "length" or "cancelled". pieces: the text of each token.
    full_tokens: prompt tokens that ran every layer. removed_share: weights that contributed nothing to a token written,
    as a share of the whole model's. dropped_layers: left out in both stages. channels: `channel_facts.facts`, of a run
    that chose its channels by the prompt, once it is done.
    """

    model: str
    plan: dict
    sampling: dict
    prompt: str
    chat: bool
    text: str
    tokens: list[int]
    pieces: list[str]
    stop: str
    prompt_tokens: int
    new_tokens: int
    prefill_ms: float
    ttft_ms: float
    step_ms: list[float]
    layers: int
    skipped_layers: int
    full_tokens: int
    device: str
    dtype: str
    dropped_layers: list[int] = field(default_factory=list)
    removed_share: float = 0.0
    channels: dict | None = None
    image_tokens: int = 0
    vision_ms: float = 0.0
    pictures: list[dict] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def decode_ms_per_token(self) -> float | None:
        """The median decode step, or None when there was none."""
        return median(self.step_ms)

    def to_dict(self) -> dict:
        return asdict(self) | {"decode_ms_per_token": self.decode_ms_per_token}


def median(values: list[float]) -> float | None:
    """The median, or None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """A speed-up, or None where a side is missing or below what a clock resolves (a microsecond)."""
    if numerator is None or denominator is None or denominator < 1e-3:
        return None
    return numerator / denominator
