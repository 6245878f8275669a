"""What a container may use: memory and processor time under a cgroup (version 1 or 2), which Python does not ask.

Both answers are None where there is no limit, no cgroup, or no Linux.
"""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_free() -> int | None:
    """Bytes that this process may still allocate: the limit less what is in use, without reclaimable file pages."""
    free = []
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return min(free, default=None)


def cpu_quota() -> float | None:
    """Processors' worth of time per second, for instance 1.5."""
    quotas = []
    for folder in _folders("cpu"):
        text = _text(folder / "cpu.max").split()  # version 2: "<quota or max> <period>"
        quota, period = text if len(text) == 2 else (_text(folder / f"cpu.cfs_{x}_us") for x in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # no limit is "max", or -1 in version 1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(controller: str) -> list[Path]:
    """Our own cgroup and those above it: each of them can hold a limit."""
    found = []
    for line in _text(MEMBERSHIP).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = ROOT / controller if controllers else ROOT
        inside = base / path.lstrip("/")
        found += [inside, *(parent for parent in inside.parents if parent.is_relative_to(base))]
    return list(dict.fromkeys(found))


def _reclaimable(stat: Path) -> int:
    rows = dict(line.split(maxsplit=1) for line in _text(stat).splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def _number(*files: Path) -> int | None:
    for file in files:
        if (text := _text(file)).isdigit():
            return int(text)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
