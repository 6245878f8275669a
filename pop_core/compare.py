"""The same prompt twice, dense and pruned: both answers, how far apart they are, and a fair timing of each phase.

The two runs advance together, token by token, so that their steps are timed on the same machine in the same state.
Their first prefill warms up; then the prefill is repeated, interleaved, and its medians count. An answer that ends
early does not look fast: only steps that both runs made are compared, per token.
"""

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from . import costs
from .divergence import divergence, mean
from .engine import Engine
from .errors import Cancelled, PopError
from .generation import Generation
from .plan import DENSE, NONE, ChannelPruning, Plan, whole_number
from .run import Run, median
from .sampling import Sampling
from .stopping import Checkpoint, carry_on
from .timing import interleaved, machine, speedup, spread

FEWEST_STEPS = 4  # paired decode steps below which no decode speed-up is claimed


@dataclass(frozen=True)
class Comparison:
    """Two runs and what separates them; plain data.

    dense, pruned: `Run.to_dict()`. *_prefill_ms: medians over the interleaved repeats (the runs' own single prefill,
    and no spread, where there were none). *_step_ms: medians over the paired steps. first_divergence: index of the
    first token that differs, None if none does. agreement: share of the dense answer's tokens where the pruned model,
    given the dense answer so far, has the same best token. kl: mean over the same tokens, in nats. predicted_speedup:
    prefill by arithmetic alone. predicted_decode_speedup: a step by the bytes that it reads; a baseline's is that of a
    fixed mask at its ratio. complete: False when it was stopped before everything was measured.
    """

    dense: dict
    pruned: dict
    dense_prefill_ms: float | None
    pruned_prefill_ms: float | None
    dense_prefill_spread: list | None
    pruned_prefill_spread: list | None
    prefill_repeats: int
    prefill_speedup: float | None
    dense_step_ms: float | None
    pruned_step_ms: float | None
    dense_step_spread: list | None
    pruned_step_spread: list | None
    paired_steps: int
    decode_speedup: float | None
    predicted_speedup: float
    predicted_decode_speedup: float
    first_divergence: int | None
    agreement: float | None
    first_token_kl: float | None
    kl: float | None
    machine: str
    threads: int
    date: str
    versions: dict
    complete: bool

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """Where a comparison stands: "reading", "writing", "measuring" or "done"; both runs; the result at the end."""

    phase: str
    dense: Run | None = None
    pruned: Run | None = None
    fraction: float = 0.0
    result: Comparison | None = None


def compare(engine: Engine, text: str, plan: Plan, **options) -> Comparison:
    """Run a whole comparison. Options as for `compare_steps`."""
    *_, last = compare_steps(engine, text, plan, **options)
    return last.result


def compare_steps(
    engine: Engine,
    text: str,
    plan: Plan,
    sampling: Sampling | None = None,
    chat: bool | None = None,
    repeats: int = 3,
    checkpoint: Checkpoint = carry_on,
    images: Sequence = (),
    image_tokens: int | None = None,
) -> Iterator[Progress]:
    """A comparison that shows its progress; the last item holds the result. images, image_tokens: as for
    `Engine.encode`; both runs share what the vision tower makes of the pictures.

    A checkpoint that raises `Cancelled` ends it with what there is, marked incomplete. Raises `PopError` before
    anything runs when plan, prompt or lengths do not fit.
    """
    sampling, repeats = sampling or Sampling(), whole_number(repeats, "number of repeats")
    if repeats < 0:
        raise PopError(f"The number of repeats is {repeats}; it must not be negative.")
    prompt = engine.encode(text, sampling, chat, images, image_tokens)
    engine.check(plan, sees=prompt.pixels is not None)
    with engine.exclusive(checkpoint):
        yield Progress("reading")
        sight = engine.look(prompt, checkpoint)
        dense, pruned = (Generation(engine, prompt, p, sampling, checkpoint, sight) for p in (DENSE, plan))
        pairs, prefills, divergences, complete = [], {"dense": [], "pruned": []}, None, False
        runs = _Runs(dense, pruned)
        try:
            for generation in (dense, pruned):
                generation.prefill()
                yield Progress("reading", *runs.now(), 0.5)
            while not (dense.done and pruned.done):
                both = not dense.done and not pruned.done
                for generation in (dense, pruned):
                    if not generation.done:
                        generation.step()
                if both:
                    pairs.append((dense.step_ms[-1], pruned.step_ms[-1]))
                done = max(len(dense.tokens), len(pruned.tokens)) / sampling.max_new_tokens
                yield Progress("writing", *runs.now(), done)
            yield Progress("measuring", *runs.now(), 0.0)
            runs.release()
            divergences = _divergences(engine, prompt.ids, dense, plan, sight)
            for index in range(repeats):
                yield Progress("measuring", *runs.now(), (index + 0.5) / (repeats + 1))
                for name, times in _prefill_round(engine, prompt.ids, plan, sampling, checkpoint, index, sight).items():
                    prefills[name] += times
            complete = True
        except Cancelled:
            for generation in (dense, pruned):
                if not generation.done:
                    generation.cancel()
        result = _result(engine, dense, runs.now(), plan, pairs, prefills, divergences, complete)
    yield Progress("done", *runs.now(), 1.0, result)


class _Runs:
    """Both runs so far. One that is done is described once: the facts of its channels take a while to tell."""

    def __init__(self, *generations: Generation):
        self.generations, self.finished = generations, {}

    def now(self) -> list[Run]:
        return [self._run(index, generation) for index, generation in enumerate(self.generations)]

    def _run(self, index: int, generation: Generation) -> Run:
        if not generation.done:
            return generation.result()
        if index not in self.finished:
            self.finished[index] = generation.result()
        return self.finished[index]

    def release(self) -> None:
        """Once both are done: what is measured next makes caches and slices of its own, and both need not fit."""
        self.now()
        for generation in self.generations:
            generation.state = generation.write = None


def _prefill_round(engine: Engine, ids, plan: Plan, sampling: Sampling, checkpoint: Checkpoint, index: int, sight):
    """One timed prefill of each, in turn as to which goes first."""
    tensor, options = engine.token_ids(ids), (sampling.max_new_tokens, checkpoint, sight)
    tasks = {
        "dense": lambda: engine.read(tensor, DENSE, *options)[0].argmax().item(),
        "pruned": lambda: engine.read(tensor, plan, *options)[0].argmax().item(),
    }
    order = list(tasks)[:: -1 if index % 2 else 1]
    return interleaved({name: tasks[name] for name in order}, 1, engine.loaded.device, warm_up=0)


def _divergences(engine: Engine, ids, dense: Generation, plan: Plan, sight):
    """KL and agreement of the pruned model along the dense answer, first token included."""
    tokens = dense.tokens or [int(dense.last)]  # an empty answer's first and only choice was to end
    prompt, continuation = engine.token_ids(ids), engine.token_ids(tokens)
    return divergence(*(engine.continuation_logits(prompt, continuation, p, sight) for p in (DENSE, plan)))


def _result(engine, dense, runs, plan, pairs, prefills, divergences, complete) -> Comparison:
    a, b = runs
    kl, same = divergences or ([], [])
    dense_steps, pruned_steps = [x for x, _ in pairs], [y for _, y in pairs]
    enough = len(pairs) >= FEWEST_STEPS
    return Comparison(
        dense=a.to_dict(),
        pruned=b.to_dict(),
        dense_prefill_ms=median(prefills["dense"]) or a.prefill_ms or None,
        pruned_prefill_ms=median(prefills["pruned"]) or b.prefill_ms or None,
        dense_prefill_spread=spread(prefills["dense"]),
        pruned_prefill_spread=spread(prefills["pruned"]),
        prefill_repeats=len(prefills["pruned"]),
        prefill_speedup=speedup(prefills["dense"], prefills["pruned"]),
        dense_step_ms=median(dense_steps),
        pruned_step_ms=median(pruned_steps),
        dense_step_spread=spread(dense_steps),
        pruned_step_spread=spread(pruned_steps),
        paired_steps=len(pairs),
        decode_speedup=speedup(dense_steps, pruned_steps) if enough else None,
        predicted_speedup=costs.prefill_limit(engine.spec, len(dense.prompt.ids), plan),
        predicted_decode_speedup=_decode_limit(engine, len(dense.prompt.ids), plan),
        first_divergence=first_difference(a, b),
        agreement=mean(same),
        first_token_kl=kl[0] if kl else None,
        kl=mean(kl),
        machine=machine(engine.loaded.device),
        threads=torch.get_num_threads(),
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        complete=complete,
    )


def _decode_limit(engine: Engine, context: int, plan: Plan) -> float:
    """1 when nothing is left out while writing."""
    left_out = plan.online or (plan.static and ChannelPruning(plan.static.ratio, 0, NONE))
    return costs.decode_limit(engine.spec, context, left_out, engine.loaded.dtype.itemsize) if left_out else 1.0


def first_difference(a: Run, b: Run) -> int | None:
    """The index of the first token in which two answers differ; the shorter one's length if it is a prefix."""
    for index, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            return index
    return None if len(a.tokens) == len(b.tokens) else min(len(a.tokens), len(b.tokens))
