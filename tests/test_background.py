"""Work that a page looks at while it runs, and its Stop flags."""

import threading

import pytest

from pages import background
from pop_core.errors import Cancelled


def test_watch_returns_results_and_raises_errors():
    def work(post, checkpoint):
        post(1)
        return "result"

    def returned(steps):
        return (yield from steps)

    steps, seen = returned(background.watch(work, threading.Event())), []
    with pytest.raises(StopIteration) as end:
        while True:
            seen.append(next(steps))
    assert end.value.value == "result" and seen == [1]
    with pytest.raises(ZeroDivisionError):
        list(background.watch(lambda post, checkpoint: 1 / 0, threading.Event()))


def test_an_impatient_watch_does_not_wait_for_work_that_hangs():
    stop, end = threading.Event(), threading.Event()
    steps = background.watch(lambda post, checkpoint: (post("begun"), end.wait(30)), stop, patient=False)
    assert next(steps) == "begun"
    stop.set()
    with pytest.raises(Cancelled):
        next(steps)
    end.set()


def test_each_session_has_its_own_flag():
    stops = background.Stops()
    a, b = stops.begin("a"), stops.begin("b")
    stops.stop("a")
    assert a.is_set() and not b.is_set() and stops.take_turn("a") is a
    assert not stops.begin("a").is_set()
    stops.forget("b")
    assert b.is_set() and stops.take_turn("b") is not b


def test_stop_knows_whether_work_is_under_way_or_still_waiting():
    stops = background.Stops()
    flag = stops.begin("a")
    assert not stops.stop("a") and flag.is_set()  # nobody will say that it stopped
    assert stops.take_turn("a") is flag  # when its turn comes, it finds the flag up
    assert stops.stop("a")
    stops.end_turn("a")
    assert not stops.stop("a")
