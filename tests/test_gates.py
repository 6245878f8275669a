"""Virtual gates: exact gradients, gates of 0 are the paper's method, and an analysis that leaves nothing behind."""

import functools
import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from laws import Subject, gap
from tiny import MAKERS, random_ids
from tiny_files import tiny_folder
from torch.nn.functional import cross_entropy

from pop_core import costs, gates, memory
from pop_core.analysis import analyse_steps
from pop_core.decoder import gated
from pop_core.engine import Engine
from pop_core.errors import Cancelled, NotEnoughMemory, PopError
from pop_core.importance import by_layer, rank_correlation, total
from pop_core.loading import load_model
from pop_core.plan import PrefillCut
from pop_core.samples import Sample

TOKENS, BOUNDARY = 14, 9  # longer than the window
EPSILON = 1e-5
IDS = random_ids(TOKENS, seed=5)


@functools.cache
def double(name: str) -> Subject:
    return Subject(name, torch.float64)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(subject: Subject, ids=IDS, boundary: int = BOUNDARY, seed: int = 3, **options) -> gates.GateGradients:
    return gates.gate_gradients(subject.decoder, ids, boundary, generator(seed), **options)


def slope(decoder, labels, where) -> float:
    """Central difference of the loss when the gates at `where` move together."""
    losses = []
    for move in (EPSILON, -EPSILON):
        moved = gates.ones(decoder, TOKENS)
        moved[where] += move
        logits = gates.gated_logits(decoder, IDS, BOUNDARY, moved)[0]
        losses.append(cross_entropy(logits, labels, reduction="sum").item())
    return (losses[0] - losses[1]) / (2 * EPSILON)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_the_slopes_of_the_loss(name):
    """Elementwise within 1e-6 of each gradient, with a floor of 1e-3 of the largest, by token and by stage."""
    subject = double(name)
    decoder, found = subject.decoder, gradients(subject)
    labels = gates.draw(gates.gated_logits(decoder, IDS, BOUNDARY)[0], generator())
    layers, tokens = torch.randint(subject.layers, (12,), generator=generator()), [0, 4, 8, 9, 10, 13] * 2
    single = [(int(layer), at % 2, token) for at, (layer, token) in enumerate(zip(layers, tokens, strict=True))]
    pairs = [(slope(decoder, labels, where), found.by_token[where], found.by_token) for where in single]
    stages = (found.prefill, slice(0, BOUNDARY)), (found.decode, slice(BOUNDARY, None))
    for layer in range(subject.layers):
        for branch in (gates.ATTENTION, gates.FFN):
            for stage, where in stages:
                pairs.append((slope(decoder, labels, (layer, branch, where)), stage[layer, branch], stage))
    for expected, value, others in pairs:
        assert abs(value - expected) <= 1e-6 * max(abs(expected), 1e-3 * others.abs().max())


def test_gates_of_one_change_nothing(subject):
    open_gates = gates.ones(subject.decoder, TOKENS)
    logits = gates.gated_logits(subject.decoder, IDS, 0, open_gates)
    assert gap(logits, subject.stock(IDS)) < 1e-4
    assert torch.equal(logits, gates.gated_logits(subject.decoder, IDS, 0))


def test_gates_of_zero_are_prefill_only_pruning(subject):
    prompt, continuation = IDS[:, : BOUNDARY + 1], IDS[:, BOUNDARY + 1 :]
    for cutoff in range(1, subject.layers):
        closed = gates.ones(subject.decoder, TOKENS)
        closed[cutoff:, :, :BOUNDARY] = 0
        pruned = subject.write(subject.read(prompt, PrefillCut(cutoff, sinks=0, boundary=1)), continuation)
        assert gap(gates.gated_logits(subject.decoder, IDS, BOUNDARY, closed), pruned) < 1e-4


def test_the_last_layer_means_exactly_nothing_to_the_prompt(subject):
    found = gradients(subject)
    assert (found.by_token[-1, :, :BOUNDARY] == 0).all() and (found.prefill[-1] == 0).all()
    assert (found.decode != 0).all() and (found.prefill[:-1] != 0).all()


def kept_bytes(decoder, ids, boundary: int, recompute: bool = False, sight=None) -> int:
    """What autograd keeps for the backward pass beside parameters, views of one storage once, and the logits."""
    parameters = {p.untyped_storage().data_ptr() for m in decoder.layers for p in m.parameters()}
    parameters |= {m.weight.untyped_storage().data_ptr() for m in (decoder.embed_tokens, decoder.lm_head, decoder.norm)}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ones = gates.ones(decoder, ids.shape[1]).requires_grad_()
        logits = gates.gated_logits(decoder, ids, boundary, ones, recompute, sight=sight)[0]
        loss = cross_entropy(logits.to(ones.dtype), logits.argmax(-1), reduction="sum")
        keep(logits.detach())
    assert loss.requires_grad  # so that nothing is let go of before it is counted
    return sum(storage.nbytes() for storage in storages.values())


def test_recomputing_gives_the_same_for_less_memory(subject):
    kept, again = gradients(subject), gradients(subject, recompute=True)
    assert torch.equal(kept.by_token, again.by_token) and kept.loss == again.loss
    sizes = [kept_bytes(subject.decoder, IDS, BOUNDARY, recompute) for recompute in (False, True)]
    assert sizes[1] < sizes[0] / 3


@pytest.mark.parametrize("length", [24, 60, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_the_memory_asked_for_is_what_a_backward_pass_keeps(name, dtype, length):
    """With `recompute` what is kept is one residual stream a layer and, on the way back, one layer in full."""
    decoder, ids, labels = Subject(name, dtype).decoder, random_ids(length), 6
    full, short = (kept_bytes(decoder, ids, length - labels, recompute) for recompute in (False, True))
    for recompute, kept in ((False, full), (True, short + full // decoder.spec.layers)):
        assert kept <= costs.analysis_bytes(decoder.spec, length, labels, dtype.itemsize, recompute) <= 3.5 * kept


def test_labels_follow_the_predictions_and_the_seed():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log().clamp(min=-1e9).expand(4000, -1)
    shares = gates.draw(logits, generator()).bincount(minlength=5) / 4000
    assert gap(shares, logits[0].exp()) < 0.03 and shares[4] == 0
    flat = torch.zeros(20, 97)
    first, same, other = (gates.draw(flat, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_the_loss_is_that_of_drawn_labels_not_of_the_text(subject):
    """Over many draws it is the entropy of the predictions, in nats."""
    ids = IDS[:, : BOUNDARY + 1]
    while ids.shape[1] < TOKENS:  # a text that the model finds most unlikely
        ids = torch.cat((ids, subject.stock(ids)[:, -1:].argmin(-1)), dim=1)
    predictions = subject.stock(ids)[0, BOUNDARY:].log_softmax(-1)
    entropies = -(predictions.exp() * predictions).sum(-1)
    spread = (predictions.exp() * (predictions + entropies[:, None]).square()).sum(-1).mean().item()
    losses = [gradients(subject, ids, seed=seed).loss for seed in range(30)]
    error = math.sqrt(spread / len(entropies) / len(losses))
    text = cross_entropy(predictions[:-1], ids[0, BOUNDARY + 1 :]).item()
    entropy, loss = entropies.mean().item(), sum(losses) / len(losses)
    assert abs(loss - entropy) < 4 * error < text - loss


def test_a_model_that_is_sure_draws_what_it_is_sure_of(monkeypatch):
    subject = Subject("llama")
    head = subject.decoder.head
    monkeypatch.setattr(subject.decoder, "head", lambda h: head(h) * 1e4)
    assert gradients(subject).loss < 1e-3
    assert cross_entropy(1e4 * subject.stock(IDS)[0, BOUNDARY:-1], IDS[0, BOUNDARY + 1 :]) > 100


@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_ranks_the_layers_alike(name):
    half = Subject(name, torch.bfloat16)
    exact, ranks = Subject(name), []
    exact.model.load_state_dict({key: value.float() for key, value in half.model.state_dict().items()})
    assert gates.ones(half.decoder, 3).dtype == torch.float32
    for subject in (half, exact):
        samples = [gradients(subject, random_ids(TOKENS, seed=seed), seed=seed) for seed in range(6)]
        assert all(found.by_token.isfinite().all() for found in samples)
        layers = by_layer(*([getattr(g, stage).tolist() for g in samples] for stage in ("prefill", "decode")))
        ranks.append([[total(entry, stage) for entry in layers] for stage in ("prefill", "decode")])
    for low, high in zip(*ranks, strict=True):
        assert rank_correlation(low, high) > 0.8


def test_gradients_of_half_precision_branches_are_summed_in_full_precision():
    branch, upstream = torch.randn(2, 1, 3, 512, generator=generator()).bfloat16()
    gate = torch.ones(1, 3, requires_grad=True)
    with torch.enable_grad():
        gated(branch, gate).backward(upstream)
    assert gap(gate.grad, (branch.double() * upstream.double()).sum(-1)) < 1e-4


def test_it_works_on_what_was_made_in_inference_mode(subject):
    expected = gradients(subject)
    with torch.inference_mode():
        ids = IDS.clone()
        assert ids.is_inference()
        inside = gradients(subject, ids)
    for found in (inside, gradients(subject, ids), gradients(subject, ids, recompute=True)):
        assert torch.equal(found.by_token, expected.by_token)


def traces(model) -> list:
    """What an analysis could leave on a model: gradients, switches and hooks."""
    parameters = [(p.requires_grad, p.grad) for p in model.parameters()]
    modules = [(m.training, {k: list(v) for k, v in vars(m).items() if k.endswith("_hooks")}) for m in model.modules()]
    return [parameters, modules]


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma3"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_nothing_is_left_on_the_model(name, recompute, end, monkeypatch, tmp_path):
    engine = Engine(load_model(str(tiny_folder(tmp_path, name))))
    model, samples = (
        engine.loaded.model,
        [Sample(tuple(random_ids(TOKENS, seed=seed)[0].tolist()), BOUNDARY) for seed in range(3)],
    )
    before, logits = traces(model), model(IDS).logits

    def interrupt(*_):
        raise Cancelled if end == "cancelled" else RuntimeError("broken")

    steps = analyse_steps(engine, samples, ablation=1, recompute=recompute)
    with pytest.raises(RuntimeError) if end == "failed" else nullcontext():
        for progress in steps:
            if progress.done == 1 and end != "done":
                monkeypatch.setattr(engine.decoder, "head", interrupt)
    assert traces(model) == before and all(p.grad is None for p in model.parameters())
    assert torch.equal(model(IDS).logits, logits)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_predictions_that_are_not_finite_are_one_sentence(monkeypatch, value):
    subject = Subject("llama")
    head = subject.decoder.head
    monkeypatch.setattr(subject.decoder, "head", lambda h: head(h).index_fill(-1, torch.tensor([3]), value))
    with pytest.raises(PopError, match="not finite"):
        gradients(subject)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_running_out_of_memory_is_one_sentence_and_frees_everything(monkeypatch, stage, recompute):
    subject = Subject("llama")
    head, expected, graph = subject.decoder.head, gradients(subject), []

    def hungry(h):
        def too_much(gradient=None):
            torch.empty(1 << 60)

        graph.append(weakref.ref(too_much))
        h.register_hook(too_much)  # lives as long as the graph
        if stage == "forward":
            too_much()
        return head(h)

    with monkeypatch.context() as patch, pytest.raises(NotEnoughMemory, match="ran out") as caught:
        patch.setattr(subject.decoder, "head", hungry)
        memory.guarded(lambda: gradients(subject, recompute=recompute), "Memory ran out.")
    gc.collect()
    assert caught.value.__context__ is None and graph[0]() is None
    assert torch.equal(gradients(subject).by_token, expected.by_token)


def test_another_error_is_not_called_a_lack_of_memory(monkeypatch):
    subject = Subject("llama")
    monkeypatch.setattr(subject.decoder, "head", lambda h: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        memory.guarded(lambda: gradients(subject), "Memory ran out.")
