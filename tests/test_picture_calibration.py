"""Fitted projections and baselines of models with eyes: fitted on pictures too, and text models keep what they have."""

import time

import pytest
import torch
from laws import gap
from tiny_vision import scribble

from pop_core import baselines, calibration, kv_fit
from pop_core.engine import Engine
from pop_core.loading import load_model
from pop_core.plan import FITTED, OWN, WANDA_SP, Baseline, Plan, PrefillCut
from pop_core.samples import image_samples
from pop_core.scene_quality import measure_scenes

KEY_OF_TEXT = "f3cb7175"  # in the names of the files that users have


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path))


def test_fits_of_text_models_are_found_again():
    assert kv_fit._calibration_key(sees=False) == KEY_OF_TEXT != kv_fit._calibration_key(sees=True)


def test_a_fit_on_pictures_is_closer_to_dense_on_scenes_that_nobody_saw(cache, monkeypatch):
    monkeypatch.setattr(calibration, "SCENES_ALONE", 60)  # to be quick
    engine, told = Engine(load_model("shapes-vl")), []
    estimate, start = kv_fit.estimate_seconds(engine), time.perf_counter()
    own, fitted = Plan(PrefillCut(6, OWN)), Plan(PrefillCut(6, FITTED))
    kv_fit.ensure(engine, fitted, lambda fraction, text: told.append((fraction, text)))
    assert estimate / 4 < time.perf_counter() - start < estimate * 4
    assert kv_fit.is_fitted(engine, 6) and told[-1][1] == "fitting projections: 60 of 60 texts and pictures"
    before, after = measure_scenes(engine, 12, [own, fitted])
    assert after.kl < 0.8 * before.kl and after.agreement >= before.agreement


def test_a_model_that_knows_text_is_fitted_on_both(engines, cache, monkeypatch):
    engine, seen = engines("qwen3-vl"), []
    monkeypatch.setattr(calibration, "calibration_segments", lambda *_: [list(range(3, 60))] * 2)
    monkeypatch.setattr(calibration, "SCENES", 3)
    features = kv_fit._features

    def counted(decoder, tokens, first, sight=None):
        seen.append(sight and sight.tokens)
        return features(decoder, tokens, first, sight)

    monkeypatch.setattr(kv_fit, "_features", counted)
    kv_fit.ensure(engine, Plan(PrefillCut(3, FITTED)))
    assert seen[:2] == [None, None] and len(seen) == 5 and all(seen[2:])


def test_features_of_a_picture_are_those_of_its_dense_forward(engines):
    """What enters each layer in the stock model, for the whole prompt but its first positions."""
    engine = engines("qwen3-vl")
    sample = calibration.Calibration(engine)[-1 + len(calibration.Calibration(engine))]
    found = kv_fit._features(engine.decoder, sample.ids, 2, engine.look(sample.prompt))
    ids = torch.tensor([sample.ids])
    image = engine.loaded.model.config.image_token_id
    engine.loaded.model.model.rope_deltas = None
    output = engine.loaded.model(
        ids, mm_token_type_ids=(ids == image).int(), output_hidden_states=True, **sample.prompt.pixels.tensors
    )
    engine.loaded.model.model.rope_deltas = None
    for layer in range(3, engine.spec.layers):
        state = output.hidden_states[layer][0, kv_fit.LEFT_OUT :]
        expected = state / (state.square().mean(-1, keepdim=True) + engine.spec.rms_eps).sqrt()
        assert gap(found[layer], expected) < 1e-3


def test_baselines_see_what_the_stock_model_does_with_a_picture(engines):
    """Moments of every FFN's activations, gathered by the stock forward."""
    engine, seen = engines("qwen3-vl"), {}
    model, picture = engine.loaded.model, scribble(24, 16)
    (sample,) = image_samples(engine, [((picture,), "Hi", "a dog")], 9)
    (found,) = baselines.calibrate(engine, [sample])
    layers = model.model.language_model.layers
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs, i=i: seen.update({i: inputs[0][0].double()}))
        for i, layer in enumerate(layers)
    ]
    ids = torch.tensor([sample.ids])
    kinds = (ids == model.config.image_token_id).int()
    model(ids, mm_token_type_ids=kinds, **sample.prompt.pixels.tensors)
    engine.eyes.forget()
    for hook in hooks:
        hook.remove()
    for i, row in enumerate(found.moments):
        ((tokens, mean, square),) = row
        assert tokens == len(sample.ids)
        assert gap(mean, seen[i].mean(0)) < 1e-5 and gap(square, seen[i].square().mean(0)) < 1e-5


def test_baselines_of_a_seeing_model_read_pictures_where_text_says_nothing(monkeypatch):
    monkeypatch.setattr(calibration, "SCENES_ALONE", 60)
    engine, told = Engine(load_model("shapes-vl")), []
    plan = Plan(baseline=Baseline(WANDA_SP, 0.2))
    baselines.ensure(engine, plan, lambda fraction, text: told.append(fraction))
    assert len(told) == 20 and told[-1] == 1  # a third of the pictures
    (quality,) = measure_scenes(engine, 4, [plan])
    assert quality.kl > 0 and 0 < quality.agreement <= 1
