import functools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from laws import Subject
from safetensors.torch import load_file, save_file
from tiny import MAKERS
from tiny_files import tiny_folder
from tiny_vision import seeing_folder

from pop_core.engine import Engine
from pop_core.loading import load_model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=MAKERS, scope="session")
def subject(request) -> Subject:
    """Every family in turn."""
    return Subject(request.param)


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Engines of models that see, by family, made when they are asked for."""

    @functools.cache
    def engine(name: str) -> Engine:
        return Engine(load_model(str(seeing_folder(tmp_path_factory.mktemp(name), name))))

    return engine


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """The folder of a tiny model with its tokenizer."""
    return tiny_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def tiny(llama) -> str:
    """The same as a visitor types it."""
    return str(llama)


@pytest.fixture
def damaged(llama, tmp_path):
    """A copy of the folder `llama`, and its tensors to be changed: `damaged.save(tensors)`."""
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    return SimpleNamespace(
        folder=tmp_path,
        weights=weights,
        tensors=load_file(llama / "model.safetensors"),
        save=lambda tensors: save_file(tensors, weights, {"format": "pt"}),
    )


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
