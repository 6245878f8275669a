"""The models in memory: a failed load changes nothing, and a run keeps the engine it began with."""

import pytest
from tiny_files import tiny_folder

from pop_core.errors import ModelNotFound, NotEnoughMemory
from pop_core.loading import load_model
from pop_core.registry import KEPT, Registry
from pop_core.sampling import Sampling


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    return [str(tiny_folder(tmp_path_factory.mktemp(n), n)) for n in ("llama", "qwen3", "gemma3")]


def test_a_model_is_loaded_once(folders):
    registry = Registry()
    assert registry.loaded(folders[0]) is None
    engine = registry.get(folders[0])
    assert registry.get(f" {folders[0]} ") is engine is registry.loaded(folders[0])


def test_a_failed_load_keeps_what_was_there(folders):
    registry = Registry()
    engine = registry.get(folders[0])
    with pytest.raises(ModelNotFound):
        registry.get("/no/such/folder")
    assert registry.get(folders[0]) is engine
    assert engine.generate("a dog", sampling=Sampling(2)).prompt_tokens > 0


def test_the_least_recently_used_model_is_let_go_and_its_runs_finish(folders):
    registry = Registry()
    first = registry.get(folders[0])
    run = first.stream("a dog", sampling=Sampling(4))
    next(run)
    for folder in folders[1:]:
        registry.get(folder)
    assert len(registry._engines) == KEPT and registry.loaded(folders[0]) is None
    *_, last = run
    assert last.result().tokens == registry.get(folders[0]).generate("a dog", sampling=Sampling(4)).tokens


def test_a_model_that_only_fits_alone_replaces_the_others_and_they_come_back(folders):
    registry = Registry(load=lambda name, *rest, progress: load_or_refuse(name))

    def load_or_refuse(name):
        if name == folders[1] and registry._engines:
            raise NotEnoughMemory("too large beside the others")
        return load_model(name)

    registry.get(folders[0])
    registry.get(folders[1])
    assert registry.loaded(folders[0]) is None
    assert registry.get(folders[0]).spec.family == "llama"


def test_a_model_that_never_fits_is_refused(folders):
    def refuse(*_, progress):
        raise NotEnoughMemory("too large")

    with pytest.raises(NotEnoughMemory):
        Registry(load=refuse).get(folders[0])
