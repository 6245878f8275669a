"""The whole analysis: gates on every sample, what each deep cutoff really costs, and, if asked for, ablation.

It shows its progress, and when it is stopped the samples done so far are the result.
"""

import datetime
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from . import importance, memory
from .ablation import Ablation, ablate, cut_divergence
from .costs import ablation_bytes, analysis_bytes, prefill_limit
from .divergence import mean
from .engine import Engine
from .errors import Cancelled, NotEnoughMemory, PopError
from .forecast import ASSUMED_TOKENS
from .gates import GateGradients, gate_gradients, gated_logits
from .importance import Importance
from .plan import Plan, PrefillCut, whole_number
from .run import median, ratio
from .stopping import Checkpoint, carry_on
from .timing import machine, milliseconds

SHARE_OF_FREE = 0.5  # of the memory that is free; above it, layers are computed again instead of kept
CUT_EVERY, MOST_CUT = 8, 8  # cutoffs are measured on one sample in eight, and on eight at most
TIMED = 4  # samples, spread over the analysis, whose plain forward is timed too
MAP_TOKENS = 512  # of the token map: the last ones of its sample


@dataclass(frozen=True)
class Progress:
    """Where an analysis stands. phase: "gates", "cutoffs", "ablation" or "done"; done: of `total` samples in it.

    seconds_left: in this phase, None before there is anything to judge by. snapshot: makes the result so far; it
    wants at least one sample.
    """

    phase: str
    done: int
    total: int
    seconds_left: float | None
    snapshot: Callable[[], Importance]


def analyse(engine: Engine, samples: list[list[int]], prompt_tokens: int, **options) -> Importance:
    """Run a whole analysis. Options as for `analyse_steps`."""
    *_, last = analyse_steps(engine, samples, prompt_tokens, **options)
    return last.snapshot()


def analyse_steps(
    engine: Engine,
    samples: list[list[int]],
    prompt_tokens: int,
    seed: int = 0,
    ablation: int = 0,
    tolerance: float = importance.TOLERANCE,
    recompute: bool | None = None,
    text: str = "",
    checkpoint: Checkpoint = carry_on,
) -> Iterator[Progress]:
    """Analyse `samples`, each the ids of a prompt of `prompt_tokens` and its continuation.

    seed: of the labels; each sample draws its own from it, whatever its place. ablation: on how many of the samples
    layers are really left out. recompute: None computes layers again on the way back where memory is short. text:
    its name, kept with the result. A checkpoint that raises `Cancelled` ends the analysis with what there is, marked
    incomplete; before the first sample is done there is nothing, and `Cancelled` goes on. Raises `PopError` before
    anything runs for lengths that do not fit, and `NotEnoughMemory`.
    """
    analysis = _Analysis(engine, samples, prompt_tokens, seed, ablation, tolerance, recompute, text)
    phases = (
        ("gates", analysis.gate, len(samples)),
        ("cutoffs", analysis.cut, min(MOST_CUT, -(-len(samples) // CUT_EVERY))),
        ("ablation", analysis.leave_out, analysis.ablated),
    )
    with engine.exclusive(checkpoint):
        yield Progress("gates", 0, len(samples), None, analysis.result)
        try:
            for phase, step, count in phases:
                analysis.stopped_in = phase
                start = time.perf_counter()
                for index in range(count):
                    checkpoint()
                    try:
                        step(index, checkpoint)
                    except NotEnoughMemory as error:
                        if phase == "gates":
                            raise
                        analysis.notices.append(f"{error} So the {phase} are measured on {index} samples.")
                        break
                    left = (time.perf_counter() - start) / (index + 1) * (count - index - 1)
                    yield Progress(phase, index + 1, count, left, analysis.result)
            analysis.stopped_in = None
        except Cancelled:
            if not analysis.gates:
                raise
    yield Progress("done", len(analysis.gates), len(samples), 0.0, analysis.result)


class _Analysis:
    """What one analysis was asked for, and what it has gathered."""

    def __init__(self, engine, samples, prompt_tokens, seed, ablation, tolerance, recompute, text):
        self.engine, self.samples, self.text = engine, samples, text
        self.notices = list(engine.loaded.notices)
        if engine.spec.sparse:
            self.notices.append("A gate is on a mixture's whole FFN branch: it says nothing about single experts.")
        self.prompt_tokens = whole_number(prompt_tokens, "number of prompt tokens")
        self.seed, self.ablated = whole_number(seed, "seed"), whole_number(ablation, "number of ablated samples")
        self.tolerance = importance.checked_tolerance(tolerance)
        self._check()
        self.recompute = self._recompute(recompute)
        self.gates: list[GateGradients] = []
        self.cuts: list[list[float]] = []
        self.ablations: list[Ablation] = []
        self.plain_ms, self.gate_ms, self.cut_ms, self.ablation_ms = [], [], [], []
        self.stopped_in: str | None = "gates"  # until it is done

    def _check(self) -> None:
        sizes, count, most = set(map(len, self.samples)), len(self.samples), importance.MOST_SAMPLES
        if not 1 <= count <= most:
            raise PopError(f"The number of samples is {count:,}; it must be 1 to {most:,}.")
        if len(sizes) > 1:
            raise PopError("The samples differ in length; they must all have the same.")
        self.new_tokens = sizes.pop() - self.prompt_tokens
        if self.prompt_tokens < 2 or self.new_tokens < 1:
            raise PopError(
                f"A sample has {self.prompt_tokens} prompt tokens and {self.new_tokens} new ones; it needs at least 2 "
                f"and 1, since the last prompt token counts as decode."
            )
        if self.prompt_tokens + self.new_tokens > importance.MOST_TOKENS:
            raise PopError(
                f"A sample has {self.prompt_tokens + self.new_tokens:,} tokens; the analysis takes at most "
                f"{importance.MOST_TOKENS:,}."
            )
        if self.seed < 0:
            raise PopError(f"The seed is {self.seed}; it must not be negative.")
        if not 0 <= self.ablated <= len(self.samples):
            raise PopError(f"The number of ablated samples is {self.ablated:,}; it must be 0 to {len(self.samples):,}.")
        self.engine.check_length(self.prompt_tokens, self.new_tokens)

    def _recompute(self, wanted: bool | None) -> bool:
        """Whether to recompute, checked against the memory that is free. Raises `NotEnoughMemory`."""
        engine, tokens, what = self.engine, self.prompt_tokens + self.new_tokens - 1, "the analysis of a sample"
        shape = engine.spec, tokens, self.new_tokens
        itemsize = engine.loaded.dtype.itemsize
        plenty = memory.free_bytes(engine.loaded.device) * SHARE_OF_FREE
        recompute = analysis_bytes(*shape, itemsize, recompute=False) > plenty if wanted is None else bool(wanted)
        memory.require(analysis_bytes(*shape, itemsize, recompute=recompute), engine.loaded.device, what)
        if self.ablated:
            memory.require(ablation_bytes(*shape), engine.loaded.device, "leaving out every layer of a sample")
        return recompute

    @property
    def boundary(self) -> int:
        """The index of the last prompt token: it writes the first new one, so it counts as decode."""
        return self.prompt_tokens - 1

    def gate(self, index: int, checkpoint: Checkpoint) -> None:
        """One forward and one backward pass; some samples also get a plain forward, to know the cost."""
        decoder, ids = self.engine.decoder, self._ids(index)
        if index == 0:
            self._timed(lambda: self._plain(ids), [])  # warm-up of the same shapes
        if index % -(-len(self.samples) // TIMED) == 0:
            self._timed(lambda: self._plain(ids), self.plain_ms)
        options = sample_generator(self.seed, self.samples[index]), self.recompute, checkpoint
        gates = self._timed(lambda: gate_gradients(decoder, ids, self.boundary, *options), self.gate_ms)
        self.gates.append(gates)

    def cut(self, index: int, checkpoint: Checkpoint) -> None:
        """What every cutoff from half the layers up really costs."""
        decoder, ids, lowest = self.engine.decoder, self._ids(index), self._lowest_cut
        cuts = self._timed(lambda: cut_divergence(decoder, ids, self.boundary, lowest, checkpoint), self.cut_ms)
        self.cuts.append(cuts)

    def leave_out(self, index: int, checkpoint: Checkpoint) -> None:
        """Ablation of one sample."""
        decoder, ids = self.engine.decoder, self._ids(index)
        ablation = self._timed(lambda: ablate(decoder, ids, self.boundary, checkpoint), self.ablation_ms)
        self.ablations.append(ablation)

    def _ids(self, index: int) -> torch.Tensor:
        return self.engine.token_ids(self.samples[index][:-1])  # nothing follows the last token that would count

    @torch.inference_mode()
    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        return gated_logits(self.engine.decoder, ids, self.boundary)

    def _timed(self, task, spent: list[float]):
        """What `task()` returns; its milliseconds join `spent`. Raises `NotEnoughMemory` if memory runs out in it."""
        found, tokens = [], self.prompt_tokens + self.new_tokens
        sentence = f"Memory ran out with samples of {tokens:,} tokens; use shorter ones."
        device = self.engine.loaded.device
        spent.append(memory.guarded(lambda: milliseconds(lambda: found.append(task()), device), sentence))
        return found[0]

    @property
    def _lowest_cut(self) -> int:
        return max(1, self.engine.spec.layers // 2)

    def result(self) -> Importance:
        """The result so far."""
        loaded, spec = self.engine.loaded, self.engine.spec
        layers = importance.by_layer(*([getattr(g, s).tolist() for g in self.gates] for s in importance.STAGES))
        ablation = importance.ablated(layers, list(map(asdict, self.ablations))) if self.ablations else None
        tokens = min(ASSUMED_TOKENS, spec.max_positions)
        spent = sum(self.gate_ms) + sum(self.cut_ms)
        return Importance(
            model=loaded.name,
            text=self.text,
            samples=len(self.gates),
            requested=len(self.samples),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            seed=self.seed,
            layers=layers,
            depth_contrast=importance.depth_contrast(layers),
            recommended_cutoff=importance.recommend(layers, self.tolerance),
            tolerance=self.tolerance,
            cut_kl=[
                {"cutoff": self._lowest_cut + at, "kl": importance.mean_and_error(values)[0]}
                for at, values in enumerate(zip(*self.cuts, strict=True))
            ],
            cut_samples=len(self.cuts),
            predicted=[
                {"cutoff": cutoff, "speedup": prefill_limit(spec, tokens, Plan(PrefillCut(cutoff)))}
                for cutoff in range(1, spec.layers + 1)
            ],
            predicted_tokens=tokens,
            token_map=self._token_map(),
            ablation=ablation and ablation | {"seconds": sum(self.ablation_ms) / 1e3},
            spearman_prefill=ablation and ablation["spearman"]["gates_ablation_prefill"],
            spearman_decode=ablation and ablation["spearman"]["gates_ablation_decode"],
            loss=mean([gates.loss for gates in self.gates]),
            recompute=self.recompute,
            seconds=spent / 1e3,
            forward_equivalents=ratio(spent / len(self.gates), median(self.plain_ms)),
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            machine=machine(loaded.device),
            date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            complete=self.stopped_in is None,
            stopped_in=self.stopped_in,
            notices=list(self.notices),
        )

    def _token_map(self) -> dict:
        """Importance by token of the first sample: `1/2 g^2` of one draw of labels, `[layers][T]` for each branch.

        pieces: the text of each token. first: the index in the sample of the first one shown. boundary: the index
        among those shown from which on they count as decode.
        """
        gates, first = self.gates[0], max(0, self.gates[0].by_token.shape[-1] - MAP_TOKENS)
        values = gates.by_token[..., first:].square() / 2
        tokenizer = self.engine.loaded.tokenizer
        return {
            "pieces": [tokenizer.decode([token]) for token in self.samples[0][first:-1]],
            "first": first,
            "boundary": max(0, self.boundary - first),
            **{
                branch: [[_three_figures(value) for value in row] for row in values[:, at].tolist()]
                for at, branch in enumerate(importance.BRANCHES)
            },
        }


def sample_generator(seed: int, sample: list[int]) -> torch.Generator:
    """The generator of one sample's labels: its own, so that they do not depend on which samples come before."""
    digest = hashlib.sha256(repr((seed, list(sample))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def _three_figures(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
