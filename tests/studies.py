"""Studies on tiny models, made once for all tests that look at them."""

import copy
from functools import cache

import torch

from pop_core import Engine, Sampling, load_model
from pop_core.channel_study import study
from pop_core.plan import CANDIDATES, ChannelPruning, Plan

PROMPT = "what is this thing that the cat and the dog see"


@cache
def _engine(folder: str) -> Engine:
    return Engine(load_model(folder))


@cache
def _made(folder: str, ratio, width, rescore, tokens, peers, prompt) -> dict:
    plan = Plan(channels=ChannelPruning(ratio, width, rescore))
    with torch.no_grad():
        sampling = Sampling(max_new_tokens=tokens)
        return study(_engine(folder), prompt, plan, sampling=sampling, chat=False, peers=peers, rounds=2).to_dict()


def tiny_study(folder, ratio=0.4, width=0.4, rescore=CANDIDATES, tokens=6, peers=True, prompt=PROMPT) -> dict:
    """A result of its own, that a test may change."""
    return copy.deepcopy(_made(str(folder), ratio, width, rescore, tokens, peers, prompt))
