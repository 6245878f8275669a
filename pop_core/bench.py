"""Speed of a plan against our own dense loop and against the stock `transformers` forward of the same loaded model.

All variants run interleaved in one process with the same dtype and threads. Times are milliseconds; speed-ups are
ratios of medians; the limit is in `costs.py`.
"""

import torch

from . import costs
from .engine import Checkpoint, Engine, carry_on
from .errors import PopError
from .plan import DENSE, Plan
from .run import median
from .timing import interleaved, machine, speedup, spread


def bench_prefill(engine: Engine, tokens: int, plan: Plan, repeats: int = 5, checkpoint: Checkpoint = carry_on) -> dict:
    """Time to read `tokens` random tokens and have the logits of the next, per variant."""
    _check(engine, plan, tokens, 1, repeats)
    ids = random_ids(engine, tokens)
    model = engine.loaded.model
    tasks = {
        "stock": lambda: model(ids, use_cache=True, logits_to_keep=1),
        "dense": lambda: engine.read(ids, DENSE, 0),
        "plan": lambda: engine.read(ids, plan, 0),
    }
    with engine.exclusive(checkpoint), torch.inference_mode():
        times = interleaved(tasks, repeats, engine.loaded.device, checkpoint=checkpoint)
    return _report(engine, plan, times, costs.prefill_limit(engine.spec, tokens, plan)) | {"tokens": tokens}


def bench_decode(
    engine: Engine, prompt_tokens: int, new_tokens: int, plan: Plan, checkpoint: Checkpoint = carry_on
) -> dict:
    """Time of one decode step after a prompt of random tokens, per variant; one round a token."""
    _check(engine, plan, prompt_tokens, new_tokens + 1, new_tokens)
    ids = random_ids(engine, prompt_tokens)
    with engine.exclusive(checkpoint), torch.inference_mode():
        tasks = {
            "stock": _stock_stepper(engine, ids),
            "dense": _stepper(engine, ids, DENSE, new_tokens + 1),
            "plan": _stepper(engine, ids, plan, new_tokens + 1),
        }
        times = interleaved(tasks, new_tokens, engine.loaded.device, checkpoint=checkpoint)
    context, dtype = prompt_tokens + new_tokens // 2, engine.loaded.dtype
    read = costs.decode_bytes(engine.spec, context, dtype)
    return _report(engine, plan, times, 1.0) | {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bytes_per_token": read,
        "bytes_per_token_dense": read,
    }


def random_ids(engine: Engine, count: int) -> torch.Tensor:
    """`[1, count]` ids from a fixed seed."""
    ids = torch.randint(0, engine.spec.vocab, (1, count), generator=torch.Generator().manual_seed(0))
    return ids.to(engine.loaded.device)


def _stepper(engine: Engine, ids: torch.Tensor, plan: Plan, room: int):
    """A function that writes one greedy token per call, reading it back as a real run does."""
    logits, cache, positions = engine.read(ids, plan, room)
    write = engine.stepper(cache, positions)
    state = {"token": logits.argmax(-1, keepdim=True)}

    def step():
        state["token"] = write(state["token"]).argmax(-1, keepdim=True)
        return state["token"].item()

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


def _check(engine: Engine, plan: Plan, prompt_tokens: int, new_tokens: int, repeats: int) -> None:
    plan.check(engine.spec.layers)
    if prompt_tokens < 1 or repeats < 1 or new_tokens < 1:
        raise PopError("The numbers of tokens and repeats must be at least 1.")
    engine.check_length(prompt_tokens, new_tokens)
    engine.projection(plan)  # set-up, not part of any round


def _report(engine: Engine, plan: Plan, times: dict[str, list[float]], limit: float) -> dict:
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
        "fraction_of_limit": against_dense / limit if against_dense is not None else None,
        "spread": {name: spread(values) for name, values in times.items()},
        "rounds": len(times["plan"]),
    }
