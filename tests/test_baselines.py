"""The peers' methods: each is what a stock model is whose weights were pruned by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch
from laws import Subject, gap
from tiny import MAKERS, random_ids
from tiny_files import tiny_folder

from pop_core import baselines, costs
from pop_core.engine import Engine
from pop_core.errors import PopError
from pop_core.loading import load_model
from pop_core.plan import BASELINES, FLAP, GRIFFIN, SHORTGPT, WANDA_SP, Baseline, ChannelPruning, Plan, PrefillCut
from pop_core.samples import Sample
from pop_core.sampling import Sampling

IDS, CONTINUATION = random_ids(12, seed=3), random_ids(7, seed=4)
TEXTS = [random_ids(30, seed=seed)[0].tolist() for seed in (5, 6)]
SAMPLES = [Sample(tuple(text), len(text)) for text in TEXTS]
RATIO = 0.4


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def engine(request, tmp_path_factory) -> Engine:
    return prepared(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=["qwen2-moe", "qwen3-moe"])
def mixture(request, tmp_path_factory) -> Engine:
    return prepared(request.param, tmp_path_factory)


def prepared(family: str, tmp_path_factory) -> Engine:
    engine = Engine(load_model(str(tiny_folder(tmp_path_factory.mktemp(family), family))))
    *_, engine.statistics = baselines.calibrate(engine, SAMPLES)
    return engine


def stock_activations(model) -> list[torch.Tensor]:
    """What enters each `down_proj` on the calibration texts, `[tokens, channels]`, by forward hooks."""
    seen = [[] for _ in model.model.layers]
    handles = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x, i=i: seen[i].append(x[0][0].double()))
        for i, layer in enumerate(model.model.layers)
    ]
    for text in TEXTS:
        model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    return [torch.cat(parts) for parts in seen]


def pruned_by_hand(engine: Engine, keep: list[torch.Tensor], means=None):
    """A copy of the stock model without the other channels; means: of the activations, for FLAP's bias."""
    model = copy.deepcopy(engine.loaded.model)
    for i, layer in enumerate(model.model.layers):
        down = layer.mlp.down_proj
        gone = torch.ones(down.in_features, dtype=torch.bool)
        gone[keep[i]] = False
        if means is not None:
            down.bias = torch.nn.Parameter(
                (down.weight[:, gone].double() @ means[i][gone]).float(), requires_grad=False
            )
        down.weight[:, gone] = 0
    return model


def along(model) -> torch.Tensor:
    """The stock logits of the continuation, `[C, vocab]`."""
    return model(torch.cat((IDS, CONTINUATION), 1)).logits[0, IDS.shape[1] - 1 : -1]


def test_wanda_sp_is_a_stock_model_with_its_channels_zeroed(engine):
    model, keep = engine.loaded.model, []
    for layer, hidden in zip(model.model.layers, stock_activations(model), strict=True):
        scores = layer.mlp.down_proj.weight.double().abs().sum(0) * hidden.norm(dim=0)
        keep.append(scores.topk(round((1 - RATIO) * len(scores))).indices)
    ours = engine.continuation_logits(IDS, CONTINUATION, Plan(baseline=Baseline(WANDA_SP, RATIO)))
    assert gap(ours, along(pruned_by_hand(engine, keep))) < 1e-4
    assert gap(ours, along(model)) > 1e-2


def test_flap_is_a_stock_model_with_its_channels_zeroed_and_a_bias(engine):
    model, scores = engine.loaded.model, []
    activations = stock_activations(model)
    for layer, hidden in zip(model.model.layers, activations, strict=True):
        score = hidden.var(dim=0) * layer.mlp.down_proj.weight.double().square().sum(0)
        scores.append((score - score.mean()) / score.std())
    threshold = torch.cat(scores).sort(descending=True).values[round((1 - RATIO) * 6 * 48) - 1]
    keep = [(score >= threshold).nonzero().flatten() for score in scores]
    assert len(set(map(len, keep))) > 1  # the layers keep different numbers
    plan = Plan(baseline=Baseline(FLAP, RATIO))
    ours = engine.continuation_logits(IDS, CONTINUATION, plan)
    by_hand = pruned_by_hand(engine, keep, [hidden.mean(0) for hidden in activations])
    assert gap(ours, along(by_hand)) < 1e-4
    assert gap(ours, along(pruned_by_hand(engine, keep))) > 1e-4  # the bias does something
    run = engine.generate("the old town", plan, Sampling(2))
    assert run.removed_share == pytest.approx(3 * 32 * (6 * 48 - sum(map(len, keep))) / costs.parameters(engine.spec))


def test_shortgpt_is_a_stock_model_with_fewer_layers(engine):
    plan = Plan(baseline=Baseline(SHORTGPT, 0.6))
    kept = engine.kept_layers(plan)
    assert len(kept) == 6 - round(0.6 * costs.ffn_share(engine.spec) * 6) < 6
    influence = []
    for i in range(6):
        changes = []
        for text in TEXTS:
            states = engine.loaded.model(torch.tensor([text]), output_hidden_states=True).hidden_states
            if i < 5:  # the last state is normed
                changes.append(1 - torch.cosine_similarity(states[i][0], states[i + 1][0], dim=-1))
        if changes:
            influence.append(torch.cat(changes).mean().item())
    assert influence == pytest.approx(engine.statistics.influence[:5], abs=1e-5)
    order = sorted(range(6), key=lambda i: -engine.statistics.influence[i])
    assert kept == sorted(order[: len(kept)])
    model = copy.deepcopy(engine.loaded.model)
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = at
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    model.config.num_hidden_layers = len(kept)
    ours = engine.continuation_logits(IDS, CONTINUATION, plan)
    assert gap(ours, along(model)) < 1e-4
    run = engine.generate("the old town", plan, Sampling(3))
    assert run.dropped_layers == sorted({*range(6)} - {*kept})
    weights = costs.layer_weights(engine.spec) * len(run.dropped_layers) / 6
    assert run.removed_share == pytest.approx(weights / costs.parameters(engine.spec))


def test_griffin_is_a_fixed_mask_with_its_own_score(engine):
    griffin = engine.continuation_logits(IDS, CONTINUATION, Plan(baseline=Baseline(GRIFFIN, RATIO)))
    same = engine.continuation_logits(IDS, CONTINUATION, Plan(channels=ChannelPruning(RATIO, 0, "none", "griffin")))
    assert torch.equal(griffin, same)


@pytest.mark.parametrize("name", [WANDA_SP, FLAP, SHORTGPT, GRIFFIN])
def test_mixtures_run_under_every_baseline(mixture, name):
    dense = mixture.continuation_logits(IDS, CONTINUATION, Plan())
    for ratio in (0.0, 0.3, 0.7, 1.0):
        plan = Plan(baseline=Baseline(name, ratio))
        logits = mixture.continuation_logits(IDS, CONTINUATION, plan)
        assert mixture.kept_layers(plan)  # never none
        removed = mixture.generate("the old town", plan, Sampling(2)).removed_share
        assert logits.isfinite().all() and (removed > 0) == (ratio > 0)
        assert (gap(logits, dense) == 0) == (ratio == 0)


def test_an_expert_that_the_text_did_not_reach_stays_whole(mixture):
    *_, short = baselines.calibrate(mixture, [Sample(tuple(TEXTS[0][:1]), 1)])
    for name in (WANDA_SP, FLAP):
        channels = baselines.static_channels(mixture.decoder, short, Baseline(name, RATIO))
        for i in mixture.spec.sparse:
            kept = channels.kept()[i][: mixture.spec.experts]
            unreached = [e for e, (count, _, _) in enumerate(short.moments[i][: mixture.spec.experts]) if not count]
            assert len(unreached) == mixture.spec.experts - mixture.spec.experts_per_token
            assert all(kept[e] == mixture.spec.expert_ffn for e in unreached)


def test_calibration_is_made_once_and_can_be_stopped(tmp_path):
    engine = Engine(load_model(str(tiny_folder(tmp_path, "llama"))))
    plan = Plan(baseline=Baseline(WANDA_SP, RATIO))
    with pytest.raises(PopError, match="calibration"):
        engine.generate("the old town", plan, Sampling(2))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        baselines.ensure(engine, plan, checkpoint=stop)
    assert engine.statistics is None and not engine._lock.locked()
    told = []
    baselines.ensure(engine, plan, lambda fraction, text: told.append(fraction))
    first = engine.statistics
    baselines.ensure(engine, plan)
    assert engine.statistics is first and told == sorted(told) and told[-1] == 1
    baselines.ensure(engine, Plan(baseline=Baseline(GRIFFIN, RATIO)))


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_stands_alone(name):
    baseline = Baseline(name, 0.3)
    for other in ({"prefill": PrefillCut(2)}, {"channels": ChannelPruning(0.3)}):
        with pytest.raises(PopError, match="stands alone"):
            Plan(baseline=baseline, **other)
    for ratio in (-0.1, 1.1, float("nan"), None, "x"):
        with pytest.raises(PopError, match="0 to 1"):
            Baseline(name, ratio)
    with pytest.raises(PopError, match="shortgpt"):
        Baseline("magic", 0.3)
    assert Plan.from_dict(Plan(baseline=baseline).to_dict()) == Plan(baseline=baseline)


def test_all_families_can_be_calibrated():
    for family in MAKERS:
        decoder = Subject(family).decoder
        engine = SimpleNamespace(decoder=decoder, spec=decoder.spec, look=lambda prompt, checkpoint: None)
        *_, statistics = baselines.calibrate(engine, SAMPLES)
        assert all(value > 0 for value in statistics.influence)
