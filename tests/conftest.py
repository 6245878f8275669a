import os
import threading

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from laws import Subject
from tiny import MAKERS
from tiny_files import tiny_folder


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=MAKERS, scope="session")
def subject(request) -> Subject:
    """Every family in turn."""
    return Subject(request.param)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """The folder of a tiny model with its tokenizer."""
    return str(tiny_folder(tmp_path_factory.mktemp("tiny") / "llama", "llama"))


@pytest.fixture(scope="session")
def result(tiny) -> dict:
    """A real comparison on the tiny model."""
    from page_runs import collect, settings  # here: tests of the core need no pages

    from pages import comparing

    return collect(comparing.run(settings(tiny), {}, threading.Event(), "test"))["result"]


@pytest.fixture
def no_toasts(monkeypatch):
    """Outside of a request there is no corner to show a warning in."""
    from pages import turns

    monkeypatch.setattr(turns, "warn", lambda sentence: None)
