"""Speed of a plan against our own dense loop and against the stock `transformers` forward of the same loaded model.

All variants run interleaved in one process with the same dtype and threads. Times are milliseconds; speed-ups are
ratios of medians; the limit is in `costs.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from . import costs
from .engine import Engine
from .errors import PopError
from .pictures import in_a_row
from .plan import CANDIDATES, DENSE, NONE, Plan
from .run import median, ratio
from .sampling import Sampling
from .state import State
from .stopping import Checkpoint, carry_on
from .timing import Stopwatch, interleaved, machine, speedup, spread

TEXT_TOKENS, TEXT_BEHIND = 1024, 32  # of a prompt, and behind pictures
PARTITIONS = 3  # reads of the prompt that scoring and slicing are timed on


def bench_prefill(
    engine: Engine,
    tokens: int | None,
    plan: Plan,
    repeats: int = 5,
    checkpoint: Checkpoint = carry_on,
    images: Sequence = (),
    image_tokens: int | None = None,
) -> dict:
    """Time to read `tokens` random tokens of text and have the logits of the next, per variant; behind pictures, as for
    `Engine.encode`, if there are any. The vision tower runs before, as often: `vision_ms` is its median time, and part
    of no variant's. tokens: None for `TEXT_TOKENS`, or, behind pictures, `TEXT_BEHIND`."""
    images = in_a_row(images)
    tokens = (TEXT_BEHIND if images else TEXT_TOKENS) if tokens is None else tokens
    _check(engine, plan, tokens, 1, repeats, bool(images))
    ids, prompt = random_ids(engine, tokens), None
    if images:
        prompt = engine.encode("?", Sampling(1), False, images, image_tokens)
        ids = torch.cat((engine.token_ids(prompt.ids), ids), dim=1)
        engine.check_length(ids.shape[1], 1, prompt.image_tokens)
    with engine.exclusive(checkpoint), torch.inference_mode():
        engine.prepare(plan)  # set-up, not part of any round
        sight, looks = None, []  # milliseconds of the tower, the warm-up's first
        for _ in range(1 + repeats if prompt else 0):
            sight = engine.eyes.look(ids, prompt.pixels, checkpoint)
            looks.append(sight.ms)
        stock = engine.eyes.stock_arguments(ids, prompt.pixels) if prompt else {}
        tasks = {
            "stock": lambda: engine.loaded.model(ids, use_cache=True, logits_to_keep=1, **stock),
            "dense": lambda: engine.read(ids, DENSE, 0, sight=sight),
            "plan": lambda: engine.read(ids, plan, 0, sight=sight),
        }
        try:
            times = interleaved(tasks, repeats, engine.loaded.device, checkpoint=checkpoint)
        finally:
            if prompt:
                engine.eyes.forget()
    report = _report(engine, plan, times, costs.prefill_limit(engine.spec, ids.shape[1], plan))
    seen = {"image_tokens": prompt.image_tokens, "vision_ms": median(looks[1:])} if prompt else {}
    return report | {"tokens": ids.shape[1]} | seen


def bench_decode(
    engine: Engine, prompt_tokens: int, new_tokens: int, plan: Plan, checkpoint: Checkpoint = carry_on
) -> dict:
    """Time of one decode step after a prompt of random tokens, per variant; one round a token.

    For a plan that prunes channels also what that costs: `scoring_ms` and `slicing_ms` once for a prompt (medians), and
    `rescore_overhead`, the time of re-scoring, choosing and zeroing as a share of the dense FFNs' time of a token.
    Against a fixed mask of the same budget the candidates' own weights have to be read too: `overhead_vs_fixed_mask`,
    the whole difference of a step, as the same share.
    """
    _check(engine, plan, prompt_tokens, new_tokens + 1, new_tokens)
    ids, room = random_ids(engine, prompt_tokens), new_tokens + 2
    rescored = plan.channels and plan.online and plan.online.rescore == CANDIDATES
    plans = {"dense": DENSE, "plan": plan} | ({"fixed": _fixed(plan)} if rescored else {})
    with engine.exclusive(checkpoint), torch.inference_mode():
        engine.prepare(plan)
        partitions = [_partition_ms(engine, ids, plan) for _ in range(PARTITIONS)] if plan.online else []
        states = {name: engine.read(ids, p, room, checkpoint) for name, p in plans.items()}
        tasks = {"stock": _stock_stepper(engine, ids)}
        tasks |= {name: greedy_steps(engine, *read) for name, read in states.items()}
        ffns, rescores = [], []  # milliseconds of each step, the warm-up's first
        if plan.online:
            logits, state = engine.read(ids, DENSE, room)
            watch = Stopwatch(engine.loaded.device)
            step = greedy_steps(engine, logits, replace(state, ffn=_timed_ffn(engine, watch)))
            tasks["ffns"] = _adding(step, lambda: watch.milliseconds, ffns)
            tasks["plan"] = _adding(tasks["plan"], lambda: states["plan"][1].channels.rescoring_ms, rescores)
        times = interleaved(tasks, new_tokens, engine.loaded.device, checkpoint=checkpoint)
    context, itemsize = prompt_tokens + new_tokens // 2, engine.loaded.dtype.itemsize
    written = new_tokens + 1  # the warm-up round too
    state = states["plan"][1]
    ffn_bytes = state.channels.bytes_read / written if state.channels else None
    dense_bytes = costs.decode_bytes(engine.spec, context, itemsize)
    read_bytes = costs.decode_bytes(state.decoder.spec, context, itemsize, ffn_bytes)
    report = _report(engine, plan, times, dense_bytes / read_bytes) | {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bytes_per_token": round(read_bytes),
        "bytes_per_token_dense": round(dense_bytes),
    }
    if plan.online:
        scoring, slicing = (median(column) for column in zip(*partitions, strict=True))
        ffn_ms, rescore_ms = median(ffns[1:]), median(rescores[1:])
        report |= {
            "scoring_ms": scoring,
            "slicing_ms": slicing,
            "partition_steps": ratio(scoring + slicing, report["ms_dense"]),
            "ms_dense_ffn": ffn_ms,
            "rescore_ms": rescore_ms,
            "rescore_overhead": ratio(rescore_ms, ffn_ms),
        }
    if rescored:
        fixed = median(times["fixed"])
        report |= {"ms_fixed_mask": fixed, "overhead_vs_fixed_mask": ratio(report["ms"] - fixed, ffn_ms)}
    return report


def bench_answer(
    engine: Engine, tokens: int, new_tokens: int, plan: Plan, repeats: int = 3, checkpoint: Checkpoint = carry_on
) -> dict:
    """Time to read a prompt of random tokens and to write an answer of `new_tokens` greedy ones, per variant."""
    _check(engine, plan, tokens, new_tokens, repeats)
    ids = random_ids(engine, tokens)

    def answer(stepper: Callable[[], Callable]) -> Callable:
        def whole():
            step = stepper()  # the prompt gives the first token
            for _ in range(new_tokens - 1):
                step()

        return whole

    tasks = {
        "stock": answer(lambda: _stock_stepper(engine, ids)),
        "dense": answer(lambda: greedy_steps(engine, *engine.read(ids, DENSE, new_tokens))),
        "plan": answer(lambda: greedy_steps(engine, *engine.read(ids, plan, new_tokens))),
    }
    with engine.exclusive(checkpoint), torch.inference_mode():
        engine.prepare(plan)  # set-up, not part of any round
        times = interleaved(tasks, repeats, engine.loaded.device, warm_up=0, checkpoint=checkpoint)
    report = _report(engine, plan, times, None)
    return report | {"tokens": tokens, "new_tokens": new_tokens}


def _fixed(plan: Plan) -> Plan:
    """The same budget as a mask that no token changes."""
    return replace(plan, channels=replace(plan.channels, rescore=NONE))


def _partition_ms(engine: Engine, ids: torch.Tensor, plan: Plan) -> tuple[float, float]:
    """What one prompt spends on scoring and on slicing."""
    channels = engine.read(ids, plan, 0)[1].channels
    return channels.scoring.milliseconds, channels.slicing.milliseconds


def _timed_ffn(engine: Engine, watch: Stopwatch) -> Callable:
    """The dense FFN, its time added up."""

    def ffn(i: int, x: torch.Tensor) -> torch.Tensor:
        with watch:
            return engine.decoder.ffn(i, x)

    return ffn


def _adding(step: Callable, total: Callable[[], float | None], added: list[float]) -> Callable:
    """A step that also keeps by how much a running total has grown, where there is one."""

    def stepped():
        before = total()
        result = step()
        if before is not None:
            added.append(total() - before)
        return result

    return stepped


def random_ids(engine: Engine, count: int) -> torch.Tensor:
    """`[1, count]` ids from a fixed seed."""
    ids = torch.randint(0, engine.spec.vocab, (1, count), generator=torch.Generator().manual_seed(0))
    if engine.spec.sees:  # the special ones would stand for pictures that are not there
        ids[torch.isin(ids, torch.tensor(list(engine.loaded.tokenizer.added_tokens_decoder)))] = ids.min()
    return ids.to(engine.loaded.device)


def greedy_steps(engine: Engine, logits: torch.Tensor, state: State):
    """A function that writes one greedy token per call, reading it back as a real run does."""
    write = engine.stepper(state)
    last = {"token": logits.argmax(-1, keepdim=True)}

    def step():
        last["token"] = write(last["token"]).argmax(-1, keepdim=True)
        return last["token"].item()

    return step


def _stock_stepper(engine: Engine, ids: torch.Tensor):
    """The same with the stock forward and its own cache."""
    model = engine.loaded.model
    state = {"out": model(ids, use_cache=True, logits_to_keep=1)}

    def step():
        token = state["out"].logits[:, -1].argmax(-1, keepdim=True)
        state["out"] = model(token, cache=state["out"].cache, use_cache=True, logits_to_keep=1)
        return token.item()

    return step


def _check(engine: Engine, plan: Plan, prompt_tokens: int, new_tokens: int, repeats: int, sees: bool = False) -> None:
    engine.check(plan, sees)
    if prompt_tokens < 1 or repeats < 1 or new_tokens < 1:
        raise PopError("The numbers of tokens and repeats must be at least 1.")
    engine.check_length(prompt_tokens, new_tokens)


def _report(engine: Engine, plan: Plan, times: dict[str, list[float]], limit: float | None) -> dict:
    against_dense = speedup(times["dense"], times["plan"])
    return {
        "model": engine.loaded.name,
        "plan": plan.to_dict(),
        "device": str(engine.loaded.device),
        "machine": machine(engine.loaded.device),
        "dtype": str(engine.loaded.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "ms": median(times["plan"]),
        "ms_dense": median(times["dense"]),
        "ms_stock": median(times["stock"]),
        "speedup_vs_dense": against_dense,
        "speedup_vs_stock": speedup(times["stock"], times["plan"]),
        "dense_speedup_vs_stock": speedup(times["stock"], times["dense"]),
        "limit_speedup": limit,
        "fraction_of_limit": ratio(against_dense, limit),
        "spread": {name: spread(values) for name, values in times.items()},
        "rounds": len(times["plan"]),
    }
