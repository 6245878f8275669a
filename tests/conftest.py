import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from laws import Subject
from tiny import MAKERS


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=MAKERS, scope="session")
def subject(request) -> Subject:
    """Every family in turn."""
    return Subject(request.param)
