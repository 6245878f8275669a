"""Events that run a model: one at a time over all visitors, with progress, and with a Stop that stops them."""

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gradio as gr

from pop_core.errors import Cancelled, PopError

from . import answers
from .background import STOPS
from .shared import MODEL_QUEUE, explain, warn

WAITING = "Waiting for the model: runs take turns, so that their times are fair"
NOT_BEGUN = answers.status("Stopped before its turn came; nothing was changed", "stopped")
SHOW_STATUS = "() => { document.getElementById('status').scrollIntoView({block: 'nearest'}); return []; }"
AT_ONCE = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

# (settings by name, the result that is on screen, stop flag, session) -> updates by the name of an output
Work = Callable[[dict, dict, threading.Event, str], Iterator[dict]]


@dataclass
class ModelEvents:
    """One page's events that run a model.

    components: by name; among them "status", "alert", "run", "stop_button" and the State "result". names: of the
    settings, in the order of the page's inputs. outputs: of what the work may change.
    """

    components: dict
    names: tuple[str, ...]
    outputs: tuple[str, ...]

    def connect(self, triggers: list, work: Work):
        """Run `work` on any of the triggers; returns the event after which everything rests."""
        c = self.components
        in_turn = MODEL_QUEUE | {
            "show_progress": "minimal", "show_progress_on": c["status"], "api_visibility": "private",
        }  # fmt: skip
        inputs = [*(c[name] for name in self.names), c["result"]]
        started = gr.on(triggers, _begin, None, [c["status"], c["alert"], *self._buttons], js=SHOW_STATUS, **AT_ONCE)
        ran = started.then(self._in_page(work), inputs, [c[name] for name in self.outputs], **in_turn)
        return ran.then(lambda: _busy(False), None, self._buttons, **AT_ONCE)

    def connect_stop(self, demo: gr.Blocks) -> None:
        """The Stop button, and a page that is closed."""
        c = self.components
        c["stop_button"].click(_stopped, None, [c["status"], *self._buttons], **AT_ONCE)
        demo.unload(_forgotten)

    def named(self, update: dict) -> dict:
        """The components of named outputs."""
        return {self.components[name]: value for name, value in update.items()}

    def when_idle(self, show: Callable[..., dict], *values, request: gr.Request):
        """What `show` makes of the values; while work is under way its own figures stay."""
        if STOPS.working(str(request.session_hash)):
            return gr.skip()
        try:
            return self.named(show(*values))
        except PopError as error:
            return self.named({"alert": answers.alert(explain(error))})

    @property
    def _buttons(self) -> list:
        return [self.components["run"], self.components["stop_button"]]

    def _in_page(self, work: Work):
        """A handler whose named outputs become components."""

        def handler(request: gr.Request, *values):
            raw, session = dict(zip(self.names, values, strict=False)), str(request.session_hash)
            flag = STOPS.take_turn(session)
            try:
                if flag.is_set():
                    yield {self.components["status"]: NOT_BEGUN}
                    return
                for update in work(raw, values[-1], flag, session):
                    yield self.named(update)
            finally:
                STOPS.end_turn(session)

        return handler


def statuses(steps: Iterator[tuple[float, str]]):
    """Work's (fraction, text) as lines for the page; returns what the work returns."""
    while True:
        try:
            fraction, text = next(steps)
        except StopIteration as end:
            return end.value
        yield {"status": answers.status(text[:1].upper() + text[1:], fraction=fraction)}


def safely(updates: Iterator[dict], drawn: str, before: Callable[[], dict], nothing_done: str) -> Iterator[dict]:
    """The updates of some work, its errors as sentences.

    drawn: the output that first changes the figures; if the work fails after that, `before` brings them back.
    nothing_done: what to say when it was stopped before it had a result.
    """
    touched = False
    try:
        yield {"alert": "", "status": answers.status("Loading")}
        for update in updates:
            touched = touched or drawn in update
            yield update
    except Cancelled:
        yield {"status": answers.status(nothing_done, "stopped")}
    except Exception as error:
        yield failure(error) | (before() if touched else {})


def failure(error: Exception) -> dict:
    """An error as a sentence, in the corner, above the results and on stderr."""
    sentence = explain(error)
    warn(sentence)
    return {"alert": answers.alert(sentence), "status": answers.status("Nothing was changed", "error")}


def names_of(read: Callable) -> tuple[str, ...]:
    """The parameters of the function that reads a page's settings, in their order."""
    return tuple(inspect.signature(read).parameters)


def _begin(request: gr.Request):
    STOPS.begin(str(request.session_hash))
    return answers.status(WAITING), "", *_busy(True)


def _stopped(request: gr.Request):
    """Running work says itself how it ended: a line from here might arrive after that one, and stay."""
    if STOPS.stop(str(request.session_hash)):
        return gr.skip(), gr.skip(), gr.update(interactive=False)
    return NOT_BEGUN, *_busy(False)


def _forgotten(request: gr.Request) -> None:
    STOPS.forget(str(request.session_hash))


def _busy(now: bool):
    """Run and Stop while something runs, and while nothing does."""
    return gr.update(interactive=not now), gr.update(interactive=now)
