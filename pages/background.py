"""Work that reports while it runs, and that a visitor can stop.

A page's generator may be abandoned at any `yield` and never be closed. So the work, which holds the model's lock,
runs in a thread that always comes to its end, and the generator only looks at it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from pop_core.errors import Cancelled

POLL_SECONDS = 0.12


class Stops:
    """A Stop flag for each visitor's current work, by session, gone when the session ends."""

    def __init__(self):
        self._flags: dict[str, threading.Event] = {}
        self._working: set[str] = set()  # sessions whose work is not only waiting for its turn

    def begin(self, session: str | None) -> threading.Event:
        """A fresh flag for work that gets in line; work still running under the old one is stopped."""
        self.stop(session)
        flag = self._flags[session or ""] = threading.Event()
        return flag

    def take_turn(self, session: str | None) -> threading.Event:
        """The flag of the work that was begun, set already if Stop was pressed while it waited."""
        self._working.add(session or "")
        return self._flags.get(session or "") or self.begin(session)

    def end_turn(self, session: str | None) -> None:
        self._working.discard(session or "")

    def stop(self, session: str | None) -> bool:
        """Raise the flag; returns whether work is under way that will see it and say so."""
        if flag := self._flags.get(session or ""):
            flag.set()
        return self.working(session)

    def working(self, session: str | None) -> bool:
        """Whether work has had its turn and is not done."""
        return (session or "") in self._working

    def forget(self, session: str | None) -> None:
        self.stop(session)
        self.end_turn(session)
        self._flags.pop(session or "", None)


STOPS = Stops()


def watch(work: Callable, stop: threading.Event, patient: bool = True, look: Callable | None = None) -> Iterator:
    """Do `work(post, checkpoint)`; yields what it posted last and returns its result, or raises what it raised.

    look: what to yield instead, for work whose progress is known elsewhere.
    patient: after Stop, wait for the work to wind up and keep its result. Otherwise `Cancelled` is raised at once, and
    the work, which may be waiting for somebody else's download, ends unheeded.
    """
    posted, outcome = [], Future()

    def checkpoint() -> None:
        if stop.is_set():
            raise Cancelled

    def run() -> None:
        try:
            outcome.set_result(work(posted.append, checkpoint))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="model work").start()
    finished, shown = False, None
    try:
        while not finished:
            finished = bool(wait([outcome], POLL_SECONDS).done)
            latest = look() if look else posted[-1] if posted else None
            posted[:-1] = []
            if latest is not shown:
                shown = latest
                yield shown
            if not patient and not finished:
                checkpoint()
    finally:
        if not finished:  # the page is gone, or does not wait
            stop.set()
    return outcome.result()
