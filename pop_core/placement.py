"""Where a model runs, in which number format, and with how many threads."""

import math
from functools import cache

import torch

from . import cgroup
from .errors import PopError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """The device meant. Raises `PopError` for one that is not there."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if cards else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise PopError(f"The device is {device!r}; it must be auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and (chosen.index or 0) >= cards:
        raise PopError(f"The device is {device!r}, but {cards} CUDA devices are visible here; use auto or cpu.")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number format meant. Raises `PopError` for one that is not offered."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise PopError(f"The dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


@cache
def fit_threads() -> None:
    """Use no more threads than a container's quota pays for: torch counts the host's cores, up to 45 times slower."""
    quota = cgroup.cpu_quota()
    if quota and torch.get_num_threads() > quota:
        torch.set_num_threads(max(1, math.ceil(quota)))
