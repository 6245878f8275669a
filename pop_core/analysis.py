"""The whole analysis: gates on every sample, what each deep cutoff really costs, and, if asked for, ablation.

It shows its progress, and when it is stopped the samples done so far are the result.
"""

import datetime
import platform
import time
from collections import Counter
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
from .samples import Sample
from .sight import Sight
from .stopping import Checkpoint, carry_on
from .timing import machine, milliseconds
from .token_map import token_map

SHARE_OF_FREE = 0.5  # of the memory that is free; above it, layers are computed again instead of kept
CUT_EVERY, MOST_CUT = 8, 8  # cutoffs are measured on one sample in eight, and on eight at most
TIMED = 4  # samples, spread over the analysis, whose plain forward is timed too


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


def analyse(engine: Engine, samples: list[Sample], **options) -> Importance:
    """Run a whole analysis. Options as for `analyse_steps`."""
    *_, last = analyse_steps(engine, samples, **options)
    return last.snapshot()


def analyse_steps(
    engine: Engine,
    samples: list[Sample],
    seed: int = 0,
    ablation: int = 0,
    tolerance: float = importance.TOLERANCE,
    recompute: bool | None = None,
    text: str = "",
    checkpoint: Checkpoint = carry_on,
) -> Iterator[Progress]:
    """Analyse `samples`, all of the same length unless they have pictures.

    seed: of the labels; each sample draws its own from it, whatever its place, and anew for one that is there again.
    ablation: on how many of the samples
    layers are really left out. recompute: None computes layers again on the way back where memory is short. text:
    its name, kept with the result. A checkpoint that raises `Cancelled` ends the analysis with what there is, marked
    incomplete; before the first sample is done there is nothing, and `Cancelled` goes on. Raises `PopError` before
    anything runs for lengths that do not fit, and `NotEnoughMemory`.
    """
    analysis = _Analysis(engine, samples, seed, ablation, tolerance, recompute, text)
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

    def __init__(self, engine, samples, seed, ablation, tolerance, recompute, text):
        self.engine, self.samples, self.text = engine, samples, text
        self.notices = list(engine.loaded.notices)
        if engine.spec.sparse:
            self.notices.append("A gate is on a mixture's whole FFN branch: it says nothing about single experts.")
        self.notices += dict.fromkeys(note for sample in samples if sample.prompt for note in sample.prompt.notices)
        self.seed, self.ablated = whole_number(seed, "seed"), whole_number(ablation, "number of ablated samples")
        self.tolerance = importance.checked_tolerance(tolerance)
        self.sees = any(sample.prompt for sample in samples)
        self._check()
        self.recompute = self._recompute(recompute)
        self.gates: list[GateGradients] = []
        self.cuts: list[list[float]] = []
        self.ablations: list[Ablation] = []
        self.plain_ms, self.gate_ms, self.cut_ms, self.ablation_ms = [], [], [], []
        self.stopped_in: str | None = "gates"  # until it is done
        self._met: Counter = Counter()  # samples by their digest
        self._looked: tuple[Sample | None, Sight | None] = None, None  # the last one; a sight may be large

    def _check(self) -> None:
        count, most = len(self.samples), importance.MOST_SAMPLES
        if not 1 <= count <= most:
            raise PopError(f"The number of samples is {count:,}; it must be 1 to {most:,}.")
        if len({(sample.prompt_tokens, sample.new_tokens) for sample in self.samples}) > 1 and not self.sees:
            raise PopError("The samples differ in length; they must all have the same.")
        for sample in self.samples:
            if sample.prompt_tokens < 2 or sample.new_tokens < 1:
                raise PopError(
                    f"A sample has {sample.prompt_tokens} prompt tokens and {sample.new_tokens} new ones; it needs at "
                    f"least 2 and 1, since the last prompt token counts as decode."
                )
        longest = max(self.samples, key=lambda sample: len(sample.ids))
        self.most_tokens, self.most_new = len(longest.ids), max(sample.new_tokens for sample in self.samples)
        if self.most_tokens > importance.MOST_TOKENS:
            of_pictures = f", {longest.image_tokens:,} of them for pictures" if longest.prompt else ""
            raise PopError(
                f"A sample has {self.most_tokens:,} tokens{of_pictures}; the analysis takes at most "
                f"{importance.MOST_TOKENS:,}."
            )
        if self.seed < 0:
            raise PopError(f"The seed is {self.seed}; it must not be negative.")
        if not 0 <= self.ablated <= count:
            raise PopError(f"The number of ablated samples is {self.ablated:,}; it must be 0 to {count:,}.")
        self.engine.check_length(longest.prompt_tokens, longest.new_tokens, longest.image_tokens)

    def _recompute(self, wanted: bool | None) -> bool:
        """Whether to recompute, checked against the memory that is free. Raises `NotEnoughMemory`."""
        engine, what = self.engine, "the analysis of a sample"
        shape = engine.spec, self.most_tokens - 1, self.most_new
        itemsize = engine.loaded.dtype.itemsize
        plenty = memory.free_bytes(engine.loaded.device) * SHARE_OF_FREE
        recompute = analysis_bytes(*shape, itemsize, recompute=False) > plenty if wanted is None else bool(wanted)
        memory.require(analysis_bytes(*shape, itemsize, recompute=recompute), engine.loaded.device, what)
        if self.ablated:
            memory.require(ablation_bytes(*shape), engine.loaded.device, "leaving out every layer of a sample")
        return recompute

    def gate(self, index: int, checkpoint: Checkpoint) -> None:
        """One forward and one backward pass; some samples also get a plain forward, to know the cost."""
        sample, (decoder, ids, boundary, sight) = self.samples[index], self._forward(index, checkpoint)
        plain = ids, boundary, sight
        if index == 0:
            self._timed(lambda: self._plain(*plain), [])  # warm-up of the same shapes
        if index % -(-len(self.samples) // TIMED) == 0:
            self._timed(lambda: self._plain(*plain), self.plain_ms)
        again = self._met[digest := sample.digest()]
        self._met[digest] += 1
        options = sample_generator(self.seed, sample, again), self.recompute, checkpoint, sight
        gates = self._timed(lambda: gate_gradients(decoder, ids, boundary, *options), self.gate_ms)
        self.gates.append(gates)

    def cut(self, index: int, checkpoint: Checkpoint) -> None:
        """What every cutoff from half the layers up really costs."""
        (decoder, ids, boundary, sight), lowest = self._forward(index, checkpoint), self._lowest_cut
        options = boundary, lowest, checkpoint, sight
        self.cuts.append(self._timed(lambda: cut_divergence(decoder, ids, *options), self.cut_ms))

    def leave_out(self, index: int, checkpoint: Checkpoint) -> None:
        """Ablation of one sample."""
        decoder, ids, boundary, sight = self._forward(index, checkpoint)
        ablation = self._timed(lambda: ablate(decoder, ids, boundary, checkpoint, sight), self.ablation_ms)
        self.ablations.append(ablation)

    def _forward(self, index: int, checkpoint: Checkpoint) -> tuple:
        """What a forward of a sample wants: decoder, ids `[1, T]`, boundary and sight."""
        sample = self.samples[index]
        if self._looked[0] is not sample:
            look = self.engine.look
            self._looked = sample, self._timed(lambda: look(sample.prompt, checkpoint), [])
        ids = self.engine.token_ids(sample.ids[:-1])  # nothing follows the last token that would count
        return self.engine.decoder, ids, sample.boundary, self._looked[1]

    @torch.inference_mode()
    def _plain(self, ids: torch.Tensor, boundary: int, sight: Sight | None) -> torch.Tensor:
        return gated_logits(self.engine.decoder, ids, boundary, sight=sight)

    def _timed(self, task, spent: list[float]):
        """What `task()` returns; its milliseconds join `spent`. Raises `NotEnoughMemory` if memory runs out in it."""
        found = []
        sentence = f"Memory ran out with samples of {self.most_tokens:,} tokens; use shorter ones."
        device = self.engine.loaded.device
        spent.append(memory.guarded(lambda: milliseconds(lambda: found.append(task()), device), sentence))
        return found[0]

    @property
    def _least_cutoff(self) -> int:
        """That prompts like these can have."""
        return max(1, self.engine.spec.deepstack if self.sees else 1)

    @property
    def _lowest_cut(self) -> int:
        """That is measured."""
        return max(self._least_cutoff, self.engine.spec.layers // 2)

    def result(self) -> Importance:
        """The result so far."""
        loaded, spec = self.engine.loaded, self.engine.spec
        stages = importance.STAGES + importance.KINDS * self.sees
        layers = importance.by_layer(**{stage: [getattr(g, stage).tolist() for g in self.gates] for stage in stages})
        ablation = importance.ablated(layers, list(map(asdict, self.ablations))) if self.ablations else None
        tokens = min(ASSUMED_TOKENS, spec.max_positions)
        spent = sum(self.gate_ms) + sum(self.cut_ms)
        return Importance(
            model=loaded.name,
            text=self.text,
            samples=len(self.gates),
            requested=len(self.samples),
            prompt_tokens=round(mean([sample.prompt_tokens for sample in self.samples])),
            new_tokens=round(mean([sample.new_tokens for sample in self.samples])),
            seed=self.seed,
            layers=layers,
            depth_contrast=importance.depth_contrast(layers),
            recommended_cutoff=importance.recommend(layers, self.tolerance, least=self._least_cutoff),
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
            token_map=token_map(self.gates[0], self.samples[0], loaded.tokenizer),
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
            image_tokens=mean([sample.image_tokens for sample in self.samples]),
            pictures=list(self.samples[0].prompt.pixels.facts) if self.samples[0].prompt else [],
            cutoffs_by_kind=importance.cutoffs_by_kind(layers, self.tolerance),
            lowest_cutoff=self._least_cutoff,
            distinct=len(self._met),
        )


def sample_generator(seed: int, sample: Sample, again: int = 0) -> torch.Generator:
    """The generator of one sample's labels: its own, so that they do not depend on which other samples come before.
    again: how often the same one was there already."""
    digest = sample.digest(seed, again) if again else sample.digest(seed)
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
