"""The one place where time is measured: warm-up, interleaving, device synchronisation, medians and spread."""

import platform
import time
from collections.abc import Callable

import torch

from .run import median, ratio
from .units import count

Task = Callable[[], object]


def milliseconds(task: Task, device: torch.device) -> float:
    """How long one call takes on the device: CUDA events there, the wall clock on a CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        task()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start = time.perf_counter()
    task()
    return (time.perf_counter() - start) * 1e3


class Stopwatch:
    """Adds up the time spent in its `with` blocks. On a GPU that is only known once the device is done with them."""

    def __init__(self, device: torch.device):
        self.cuda, self._spent, self._events = device.type == "cuda", 0.0, []

    def __enter__(self):
        if self.cuda:
            self._events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            self._events[-1][0].record()
        else:
            self._start = time.perf_counter()

    def __exit__(self, *_):
        if self.cuda:
            self._events[-1][1].record()
        else:
            self._spent += time.perf_counter() - self._start

    @property
    def milliseconds(self) -> float:
        """The sum so far. Waits for the device."""
        for start, end in self._events:
            end.synchronize()
            self._spent += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self._spent * 1e3


def interleaved(
    tasks: dict[str, Task], repeats: int, device: torch.device, warm_up: int = 1, checkpoint: Task | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each task in each round, `{name: [repeats]}`.

    Every round runs every task, the first one rotating, so that drift of the machine falls on all alike. `warm_up`
    rounds run before and are not counted.
    """
    names, times = list(tasks), {name: [] for name in tasks}
    for index in range(warm_up + repeats):
        for at in range(len(names)):
            if checkpoint:
                checkpoint()
            name = names[(at + index) % len(names)]
            spent = milliseconds(tasks[name], device)
            if index >= warm_up:
                times[name].append(spent)
    return times


def speedup(slow: list[float], fast: list[float]) -> float | None:
    """How many times faster, by the medians that are shown beside it; None without rounds of both."""
    return ratio(median(slow), median(fast))


def spread(times: list[float]) -> list[float] | None:
    """The fastest and the slowest round."""
    return [min(times), max(times)] if times else None


def machine(device: torch.device) -> str:
    """What a recorded number ran on, in a phrase."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = next((line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()} CPU, {count(torch.get_num_threads(), 'thread')}"


def _cpu_lines() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return file.readlines()
    except OSError:  # not Linux
        return []
