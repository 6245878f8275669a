"""Fitted projections: a closed form that must beat the own weights on the text it was fitted to, and cost nothing."""

import pytest
import torch
from laws import gap
from safetensors.torch import save_file
from tiny import random_ids
from tiny_files import tiny_folder

from pop_core import calibration, kv_fit
from pop_core.engine import Engine
from pop_core.errors import Cancelled, PopError
from pop_core.kv_projection import folded_weight, own_projection, unit_rms
from pop_core.loading import load_model
from pop_core.plan import Plan, PrefillCut
from pop_core.samples import Sample

SEGMENTS = [random_ids(40, seed=s)[0].tolist() for s in range(20)]
SAMPLES = [Sample(tuple(ids), len(ids)) for ids in SEGMENTS]


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma3"])
def engine(request, tmp_path, monkeypatch) -> Engine:
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "cache"))
    return Engine(load_model(str(tiny_folder(tmp_path / "model", request.param))))


def load(engine, cutoff: int):
    return kv_fit.load(engine.decoder, engine.loaded.identity(), cutoff)


def keys_values(engine, cutoff: int, project, ids):
    """Projected and dense keys and values of the skipped layers, without the left-out first positions."""
    decoder = engine.decoder
    features = kv_fit._features(decoder, ids, cutoff)
    x = features[cutoff].float()
    guessed = torch.nn.functional.linear(x, project.weight.float(), project.bias)
    wanted = []
    for i in range(cutoff, decoder.spec.layers):
        weight, bias = own_projection(decoder, i).weight, own_projection(decoder, i).bias
        rows = 2 * decoder.spec.kv_width
        wanted.append(torch.nn.functional.linear(features[i], weight[:rows], None if bias is None else bias[:rows]))
    return guessed, torch.cat(wanted, dim=1)


def test_the_fit_is_closer_to_the_dense_keys_and_values_than_the_own_weights(engine):
    kv_fit.fit(engine, SAMPLES, [2, 4])
    for cutoff in (2, 4):
        fitted, own = load(engine, cutoff), own_projection(engine.decoder, cutoff)
        assert fitted.weight.shape == own.weight.shape
        errors = {}
        for name, project in (("fitted", fitted), ("own", own)):
            pairs = [keys_values(engine, cutoff, project, ids) for ids in SEGMENTS]
            errors[name] = sum((a - b).pow(2).sum().item() for a, b in pairs)
        assert errors["fitted"] < 0.9 * errors["own"]


def test_the_first_skipped_layer_needs_no_correction(engine):
    """Its own weights are exact, so the residual is zero and the ridge leaves them alone."""
    kv_fit.fit(engine, SAMPLES, [3])
    rows = 2 * engine.spec.kv_width
    fitted, own = load(engine, 3), own_projection(engine.decoder, 3)
    assert gap(fitted.weight[:rows], own.weight[:rows]) < 1e-3


def test_the_normal_equations_are_ridge_regression(engine):
    """The accumulated solution against the textbook formula on all rows at once."""
    decoder, cutoff = engine.decoder, 4
    equations, xs, ys = kv_fit._NormalEquations(decoder, cutoff), [], []
    for ids in SEGMENTS:
        features = kv_fit._features(decoder, ids, cutoff)
        y = torch.cat([torch.nn.functional.linear(features[i], folded_weight(decoder, i)[0]) for i in (4, 5)], dim=1)
        equations.add(features[cutoff], y)
        xs.append(features[cutoff].double())
        ys.append(y.double())
    x, y, own = torch.cat(xs), torch.cat(ys), equations.own.double()
    centred, residual = x - x.mean(0), y - x @ own.T
    gram = centred.T @ centred
    ridge = kv_fit.RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    expected = own + torch.linalg.solve(gram + ridge, centred.T @ (residual - residual.mean(0))).T
    assert gap(equations.solve()[0].double(), expected) < 1e-3


def test_one_pass_serves_every_cutoff(engine):
    kv_fit.fit(engine, SAMPLES, [4])
    alone = load(engine, 4)
    kv_fit.fit(engine, SAMPLES, [3, 4, 5])
    together = load(engine, 4)
    assert gap(alone.weight, together.weight) < 1e-5


def test_an_abandoned_fit_saves_nothing_and_says_so(engine):
    def stop():
        raise Cancelled

    with pytest.raises(Cancelled):
        kv_fit.fit(engine, SAMPLES, [3], checkpoint=stop)
    assert not kv_fit.is_fitted(engine, 3)
    with pytest.raises(PopError, match="No projections are fitted for cutoff 3"):
        engine.generate("a dog", Plan(PrefillCut(3, "fitted")))


def test_ensure_fits_once_and_runs_use_it(engine, monkeypatch):
    monkeypatch.setattr(calibration, "calibration_segments", lambda *_: SEGMENTS)
    plan, seen = Plan(PrefillCut(3, "fitted")), []
    kv_fit.ensure(engine, plan, lambda fraction, text: seen.append(fraction))
    assert seen == sorted(seen) and len(seen) == len(SEGMENTS)
    kv_fit.ensure(engine, plan, lambda *_: pytest.fail("fitted twice"))
    fitted, own = engine.generate("a dog", plan), engine.generate("a dog", Plan(PrefillCut(3)))
    assert fitted.plan["prefill"]["kv"] == "fitted" and own.plan["prefill"]["kv"] == "own"
    assert kv_fit.is_fitted(engine, 5)  # the same pass served the other cutoffs


def test_a_damaged_file_is_made_again(engine, monkeypatch):
    monkeypatch.setattr(calibration, "calibration_segments", lambda *_: SEGMENTS)
    path = kv_fit.fitted_path(engine.loaded.identity(), 3, sees=False)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cut off")
    assert not kv_fit.is_fitted(engine, 3)
    plan = Plan(PrefillCut(3, "fitted"))
    kv_fit.ensure(engine, plan)
    assert engine.generate("a dog", plan).skipped_layers == 3


def test_a_damaged_file_is_one_sentence(engine):
    path = kv_fit.fitted_path(engine.loaded.identity(), 3, sees=False)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not safetensors")
    with pytest.raises(PopError, match="cannot be read"):
        engine.generate("a dog", Plan(PrefillCut(3, "fitted")))


@pytest.mark.parametrize(
    "tensors",
    [
        dict(weight=torch.zeros(3, 32), bias=torch.zeros(3)),
        dict(weight=torch.zeros(1, 1)),
        dict(weight=torch.full((3 * 2 * 16, 32), float("nan")), bias=torch.zeros(3 * 2 * 16)),
    ],
)
def test_a_file_of_another_model_is_one_sentence(engine, tensors):
    path = kv_fit.fitted_path(engine.loaded.identity(), 3, sees=False)
    path.parent.mkdir(parents=True)
    save_file(tensors, path)
    with pytest.raises(PopError, match="delete the file"):
        engine.generate("a dog", Plan(PrefillCut(3, "fitted")))


def test_a_cache_that_cannot_be_written_is_one_sentence(engine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "file"))
    with pytest.raises(PopError, match="cannot be written"):
        kv_fit.fit(engine, SAMPLES[:2], [3])


def test_calibration_text_has_about_twenty_thousand_tokens_for_a_real_tokenizer():
    assert 60_000 < len(calibration.read_all()) < 120_000
    assert {path.stem for path in calibration.CALIBRATION.glob("*.txt")} == set(calibration.KINDS)


def test_unit_rms_is_what_the_norm_does_before_its_gain(subject):
    x, spec, norm = torch.randn(2, 3, 32), subject.decoder.spec, subject.decoder.layers[1].input_layernorm
    assert gap(unit_rms(x, spec.rms_eps) * (spec.norm_offset + norm.weight), norm(x)) < 1e-5
