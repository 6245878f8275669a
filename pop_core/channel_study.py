"""One prompt, looked at closely: which FFN channels a run keeps, token by token, and how it stands beside its peers.

The answer is written under the plan, and once more dense. Along the dense answer every method of the table gives its
own predictions, which are held against the dense ones; then all methods write some tokens in turn, so that their
steps are timed on the same machine in the same state.
"""

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from . import baselines, memory
from .bench import greedy_steps
from .channel_facts import removed_share, top_half_overlap
from .channels import OnlineChannels
from .compare import first_difference
from .decode import extend
from .divergence import divergence, mean
from .engine import Engine
from .errors import Cancelled, NotEnoughMemory, PopError
from .generation import Generation
from .plan import ALL, BASELINES, CANDIDATES, DENSE, NONE, Baseline, ChannelPruning, Plan
from .run import Run, median
from .sampling import Sampling
from .stopping import Checkpoint, carry_on
from .timing import interleaved, machine, spread

ROUNDS, PART = 24, 4  # timed steps of each method, and how many between two looks at Stop's progress
OURS = "plan"
TITLES = {
    "dense": "Dense",
    OURS: "Candidates",
    NONE: "Fixed mask",
    ALL: "All re-scored",
    "griffin": "GRIFFIN",
    "wanda-sp": "Wanda-sp",
    "flap": "FLAP",
    "shortgpt": "ShortGPT",
}


@dataclass(frozen=True)
class Study:
    """Plain data.

    dense, pruned: `Run.to_dict()`. methods: one entry a method, the dense model first, then the plan, then those it is
    held against: name, title, plan, removed_share, kl and first_token_kl in nats, agreement (None for dense), step_ms
    with its spread, partition_ms (scoring and slicing of this prompt; 0 where nothing is done for a prompt). None where
    it was not measured. top_half: for each layer the share of a token's best half of the channels, by the score of that
    token, that is the next token's best half too, along the dense answer; None for mixtures. tokens: of the dense
    answer that were compared. complete: False when it was stopped.
    """

    model: str
    plan: dict
    dense: dict
    pruned: dict
    first_divergence: int | None
    methods: list[dict]
    top_half: list[float | None]
    tokens: int
    rounds: int
    machine: str
    threads: int
    date: str
    versions: dict
    complete: bool
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """Where a study stands: "calibrating", "writing", "measuring", "timing" or "done". run: the pruned one, while it
    is written. method: the title of the one that is measured. result: at the end."""

    phase: str
    fraction: float = 0.0
    run: Run | None = None
    method: str = ""
    result: Study | None = None


def study(engine: Engine, text: str, plan: Plan, **options) -> Study:
    """A whole study. Options as for `study_steps`."""
    *_, last = study_steps(engine, text, plan, **options)
    return last.result


def study_steps(
    engine: Engine,
    text: str,
    plan: Plan,
    sampling: Sampling | None = None,
    chat: bool | None = None,
    peers: bool = True,
    rounds: int = ROUNDS,
    checkpoint: Checkpoint = carry_on,
    images: Sequence = (),
    image_tokens: int | None = None,
) -> Iterator[Progress]:
    """A study that shows its progress; the last item holds the result.

    plan: prunes channels. peers: also the methods that know calibration text, which takes some seconds the first time.
    images, image_tokens: as for `Engine.encode`. A checkpoint that raises `Cancelled` ends it with what there is, once
    the pruned answer has begun. Raises `PopError` before anything runs when plan, prompt or lengths do not fit.
    """
    if not plan.channels or not plan.online:
        raise PopError("This plan prunes no channels; give a prune ratio above 0.")
    sampling = sampling or Sampling()
    prompt = engine.encode(text, sampling, chat, images, image_tokens)
    engine.check(plan, sees=prompt.pixels is not None)
    methods = plans_of(plan, peers)
    yield Progress("calibrating")
    for other in methods.values():
        for fraction in baselines.ensure_steps(engine, other, checkpoint):
            yield Progress("calibrating", fraction)
    engine.prepare(plan)
    with engine.exclusive(checkpoint):
        work = _Study(engine, prompt, engine.look(prompt, checkpoint), plan, sampling, methods, rounds, checkpoint)
        try:
            yield from work.steps()
            work.complete = True
        except Cancelled:
            if not work.pruned.tokens:
                raise
            for generation in (work.pruned, work.dense):
                if not generation.done:
                    generation.cancel()
        result = work.result()
        engine.drop_static()
    yield Progress("done", 1.0, result=result)


def plans_of(plan: Plan, peers: bool) -> dict[str, Plan]:
    """The methods of the table, by name. All but the dense one keep the plan's prefill cut if they can."""
    ours: ChannelPruning = plan.channels
    others = {rescore: replace(plan, channels=replace(ours, rescore=rescore)) for rescore in (NONE, ALL)}
    found = {"dense": DENSE, OURS: plan} | others
    names = [name for name in BASELINES if peers or name == "griffin"]
    found |= {name: Plan(baseline=Baseline(name, ours.ratio)) for name in TITLES if name in names}
    return {name: p for name, p in found.items() if name == OURS or p != plan}


class _Study:
    """What one study was asked for, and what it has gathered."""

    def __init__(self, engine, prompt, sight, plan, sampling, methods, rounds, checkpoint):
        self.engine, self.prompt, self.sight, self.plan, self.sampling = engine, prompt, sight, plan, sampling
        self.methods, self.rounds, self.checkpoint = methods, rounds, checkpoint
        self.pruned, self.dense = (Generation(engine, prompt, p, sampling, checkpoint, sight) for p in (plan, DENSE))
        self.rows = {
            name: {"name": name, "title": _title(name, plan), "plan": p.to_dict()} for name, p in methods.items()
        }
        self.top_half: list[float | None] = [None] * engine.spec.layers
        self.times: dict[str, list[float]] = {name: [] for name in methods}
        self.tokens = 0
        self.notices: list[str] = []
        self.complete = False

    def steps(self) -> Iterator[Progress]:
        for generation in (self.pruned, self.dense):
            yield self._written(generation)
            generation.prefill()
            while not generation.done:
                yield self._written(generation)
                generation.step()
        tokens = self.dense.tokens or [int(self.dense.last)]  # an empty answer's first and only choice was to end
        ids, continuation = self.engine.token_ids(self.prompt.ids), self.engine.token_ids(tokens)
        reference = self._reference(ids, continuation)
        self.tokens = len(tokens)
        for count, name in enumerate(self.methods):
            yield Progress("measuring", count / len(self.methods), method=self.rows[name]["title"])
            self.checkpoint()
            self._measure(name, ids, continuation, reference)
        yield from self._timing(ids)

    def _written(self, generation: Generation) -> Progress:
        share = len(generation.tokens) / self.sampling.max_new_tokens
        return Progress("writing", share / 2 + (generation is self.dense) / 2, self.pruned.result())

    @torch.inference_mode()
    def _reference(self, ids: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
        """The dense logits along the answer; on the way, how far each layer's best half of the channels overlaps."""
        decoder, sparse = self.engine.decoder, self.engine.spec.sparse
        norms = self.engine.column_norms(self.plan.online.score)

        def see(i, e, tokens, hidden):
            if i not in sparse and len(hidden) > 1:
                self.top_half[i] = top_half_overlap(hidden.float().abs() * norms[i][0])

        first, state = self.engine.read(ids, DENSE, continuation.shape[1], sight=self.sight)
        if continuation.shape[1] == 1:
            return first
        rest = extend(decoder, state.cache, state.positions, continuation[:, :-1], lambda i, x: decoder.ffn(i, x, see))[
            0
        ]
        return torch.cat((first, rest))

    def _measure(self, name: str, ids, continuation, reference) -> None:
        """How far a method's predictions along the dense answer are from the dense ones, and what it left out."""
        row, plan = self.rows[name], self.methods[name]
        logits, state = self.engine.continuation(ids, continuation, plan, self.sight)
        row |= {"removed_share": removed_share(state, self.engine.spec), "partition_ms": 0.0}
        if isinstance(state.channels, OnlineChannels):
            row["partition_ms"] = state.channels.scoring.milliseconds + state.channels.slicing.milliseconds
            if continuation.shape[1] == 1:  # that token comes from the prompt, which is read dense
                row["removed_share"] = 0.0
        if name != "dense":
            kl, same = divergence(reference, logits)
            row |= {"kl": mean(kl), "first_token_kl": kl[0], "agreement": mean(same)}

    @torch.inference_mode()
    def _timing(self, ids: torch.Tensor) -> Iterator[Progress]:
        """All methods write, in turn; each holds its own copy of the channels that it keeps."""
        yield Progress("timing", 0.0)
        engine, tasks = self.engine, {}
        try:
            copies = sum(map(engine.copied_bytes, self.methods.values()))
            memory.require(copies, engine.loaded.device, "one copy of the channels for each method at once")
        except NotEnoughMemory as error:
            self.notices.append(f"{error} So no times were taken.")
            return
        for name, plan in self.methods.items():
            tasks[name] = greedy_steps(engine, *engine.read(ids, plan, self.rounds + 1, self.checkpoint, self.sight))
        done = 0
        while done < self.rounds:
            part = min(PART, self.rounds - done)
            times = interleaved(tasks, part, engine.loaded.device, warm_up=int(not done), checkpoint=self.checkpoint)
            for name, values in times.items():
                self.times[name] += values
            done += part
            yield Progress("timing", done / self.rounds)

    def result(self) -> Study:
        engine, dense, pruned = self.engine, self.dense.result(), self.pruned.result()
        nothing = dict.fromkeys(("removed_share", "kl", "first_token_kl", "agreement", "partition_ms"))
        for name, row in self.rows.items():
            times = self.times[name]
            self.rows[name] = nothing | row | {"step_ms": median(times), "step_spread": spread(times)}
        return Study(
            model=engine.loaded.name,
            plan=self.plan.to_dict(),
            dense=dense.to_dict(),
            pruned=pruned.to_dict(),
            first_divergence=first_difference(dense, pruned),
            methods=list(self.rows.values()),
            top_half=self.top_half,
            tokens=self.tokens,
            rounds=len(self.times["dense"]),
            machine=machine(engine.loaded.device),
            threads=torch.get_num_threads(),
            date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            complete=self.complete,
            notices=list(dict.fromkeys([*engine.loaded.notices, *pruned.notices, *self.notices])),
        )


def _title(name: str, plan: Plan) -> str:
    if name != OURS:
        return TITLES[name]
    return {CANDIDATES: TITLES[OURS], NONE: TITLES[NONE], ALL: TITLES[ALL]}[plan.channels.rescore]
