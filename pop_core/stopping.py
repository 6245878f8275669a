"""How work is stopped: it calls its checkpoint again and again, and a checkpoint may raise `Cancelled`."""

from collections.abc import Callable

Checkpoint = Callable[[], None]


def carry_on() -> None:
    """The checkpoint of work that nobody can stop."""
