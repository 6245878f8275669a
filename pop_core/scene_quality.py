"""What a plan costs in answers: exact answers, KL and agreement on scenes that training never saw (`scenes.py`).

An answer is exact when greedy decoding would write it and end there: each of its tokens, and then an end, is the most
likely one after those before it. So one teacher-forced pass a question tells it, and KL and agreement with it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from . import scenes
from .divergence import divergence, mean
from .engine import Engine
from .errors import PopError
from .plan import DENSE, Plan, whole_number
from .sampling import Sampling
from .stopping import Checkpoint, carry_on
from .text import encode_text

MOST_SCENES = 10_000


@dataclass(frozen=True)
class SceneQuality:
    """accuracy_dense, accuracy: shares of exact answers. kl: mean over the tokens of all right answers and their ends,
    nats. agreement: share of equal best tokens. by_kind: of each kind of question `{questions, dense, plan}`, the last
    two as numbers of exact answers."""

    plan: dict
    accuracy_dense: float
    accuracy: float
    kl: float
    agreement: float
    scenes: int
    questions: int
    tokens: int
    by_kind: dict

    def to_dict(self) -> dict:
        return asdict(self)


def measure_scenes(
    engine: Engine,
    number: int,
    plans: list[Plan],
    checkpoint: Checkpoint = carry_on,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
) -> list[SceneQuality]:
    """Each plan on the same questions, one of every kind that a scene allows; the dense model reads each once.

    Raises `PopError` for a model without eyes and for a plan that it cannot run with pictures.
    """
    number = whole_number(number, "number of scenes")
    if not 1 <= number <= MOST_SCENES:
        raise PopError(f"The number of scenes is {number:,}; it must be 1 to {MOST_SCENES:,}.")
    for plan in plans:
        engine.check(plan, sees=True)
    if not engine.ends:
        raise PopError("This model has no end token, so it cannot end an answer, and none would be exact.")
    totals = [_Total() for _ in plans]
    with engine.exclusive(checkpoint):
        for at, (scene, questions) in enumerate(scenes.held_out_questions(number)):
            progress(at / number, f"scene {at + 1} of {number}")
            picture = scenes.picture(scene)
            for question in questions:
                checkpoint()
                prompt = engine.encode(question.text, Sampling(), images=[picture])
                target = [*encode_text(engine.loaded.tokenizer, question.answer), min(engine.ends)]
                ids, continuation = engine.token_ids(prompt.ids), engine.token_ids(target)
                sight = engine.look(prompt, checkpoint)
                dense = engine.continuation_logits(ids, continuation, DENSE, sight)
                right = _exact(dense, target, engine.ends)
                for plan, total in zip(plans, totals, strict=True):
                    logits = engine.continuation_logits(ids, continuation, plan, sight)
                    total.add(question.kind, right, _exact(logits, target, engine.ends), divergence(dense, logits))
    return [total.quality(plan, number) for plan, total in zip(plans, totals, strict=True)]


def best_kept(found: list[dict], layers: int) -> dict:
    """Of `SceneQuality.to_dict()`s, the one that answers best with `layers` layers reading and all channels writing."""
    those = [q for q in found if q["plan"]["prefill"] and not q["plan"]["channels"]]
    return max((q for q in those if q["plan"]["prefill"]["cutoff"] == layers), key=lambda q: (q["accuracy"], -q["kl"]))


def _exact(logits, target: list[int], ends: frozenset[int]) -> bool:
    """Whether greedy decoding writes `target` but its last token, and then any end."""
    *answer, last = logits.argmax(-1).tolist()
    return answer == target[:-1] and last in ends


class _Total:
    """What one plan has got so far."""

    def __init__(self):
        self.by_kind = {kind: {"questions": 0, "dense": 0, "plan": 0} for kind in scenes.KINDS}
        self.kl, self.same = [], []

    def add(self, kind: str, dense: bool, plan: bool, apart) -> None:
        count = self.by_kind[kind]
        count["questions"] += 1
        count["dense"] += dense
        count["plan"] += plan
        self.kl += apart[0]
        self.same += apart[1]

    def quality(self, plan: Plan, number: int) -> SceneQuality:
        asked, dense, right = (
            sum(kind[name] for kind in self.by_kind.values()) for name in ("questions", "dense", "plan")
        )
        return SceneQuality(
            plan=plan.to_dict(),
            accuracy_dense=dense / asked,
            accuracy=right / asked,
            kl=mean(self.kl),
            agreement=mean(self.same),
            scenes=number,
            questions=asked,
            tokens=len(self.kl),
            by_kind=self.by_kind,
        )
