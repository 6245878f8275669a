"""A run belongs to itself: isolation, cancel, errors, seeds, lengths, ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from laws import gap
from tiny import random_ids
from tiny_files import tiny_folder

from pop_core import costs
from pop_core.engine import Engine
from pop_core.errors import Cancelled, NotEnoughMemory, PopError
from pop_core.generation import Generation
from pop_core.loading import load_model
from pop_core.plan import DENSE, Baseline, ChannelPruning, Plan, PrefillCut
from pop_core.sampling import Sampling

TEXT = "a dog and a cat walk into the old town"
LONG_ANSWER = Sampling(30)
CUTS = [DENSE, Plan(PrefillCut(2)), Plan(PrefillCut(4, sinks=2, boundary=3))]
CHANNELS = [
    Plan(channels=ChannelPruning(0.6, 0.3)),
    Plan(channels=ChannelPruning(0.6, rescore="none")),
    Plan(PrefillCut(3), ChannelPruning(0.3, 0.2)),
    Plan(baseline=Baseline("griffin", 0.5)),
]


@pytest.fixture(scope="module", params=["llama-tied", "gemma3", "qwen2-moe"])
def engine(request, tmp_path_factory) -> Engine:
    return Engine(load_model(str(tiny_folder(tmp_path_factory.mktemp(request.param), request.param))))


@pytest.fixture
def endless(engine, monkeypatch):
    """The same engine with no end-of-text token, so that lengths are known."""
    monkeypatch.setattr(engine, "ends", frozenset())
    return engine


def test_greedy_text_is_the_stock_generation(endless):
    run = endless.generate(TEXT, sampling=LONG_ANSWER)
    ids = endless.token_ids(endless.encode(TEXT, LONG_ANSWER).ids)
    stock = endless.loaded.model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert run.tokens == stock[0, ids.shape[1] :].tolist()
    assert run.stop == "length" and run.new_tokens == 30 and len(run.step_ms) == 29


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_interleaved_runs_give_what_they_give_alone(endless, temperature):
    """Two plans advance step by step on one model, as they do in a comparison."""
    sampling = Sampling(20, temperature, seed=7)
    plans = CUTS + CHANNELS
    alone = [endless.generate(TEXT, plan, sampling).tokens for plan in plans]
    prompt = endless.encode(TEXT, sampling)
    runs = [Generation(endless, prompt, plan, sampling) for plan in plans]
    for run in runs:
        run.prefill()
    while not all(run.done for run in runs):
        for run in runs:
            run.step()
    assert [run.tokens for run in runs] == alone
    assert alone[0] != alone[1] and alone[0] not in (alone[3], alone[4])  # the plans do differ


def test_two_threads_each_get_their_own_answer(endless):
    jobs = [(TEXT, CUTS[0]), ("something else entirely", CUTS[1]), (TEXT, CUTS[1]), (TEXT, CUTS[2])] * 3
    alone = [endless.generate(text, plan, LONG_ANSWER).tokens for text, plan in jobs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda job: endless.generate(*job, LONG_ANSWER).tokens, jobs))
    assert together == alone


def test_the_engine_serves_one_run_at_a_time(endless):
    first = endless.stream(TEXT, sampling=LONG_ANSWER)
    next(first)
    waiting = threading.Event()

    def give_up():
        waiting.set()
        raise Cancelled

    with pytest.raises(Cancelled):
        next(endless.stream(TEXT, checkpoint=give_up))
    assert waiting.is_set()
    first.close()
    assert endless.generate(TEXT, sampling=Sampling(2)).new_tokens == 2


@pytest.mark.parametrize("plan", CUTS)
def test_a_cancel_takes_effect_within_one_step_and_keeps_the_text(endless, plan):
    count = 0

    def checkpoint():
        nonlocal count
        count += 1
        if count > endless.spec.layers + 5:
            raise Cancelled

    whole, before = endless.generate(TEXT, plan, LONG_ANSWER), _dense_logits(endless)
    run = endless.generate(TEXT, plan, LONG_ANSWER, checkpoint=checkpoint)
    assert run.stop == "cancelled" and run.new_tokens == 6
    assert run.tokens == whole.tokens[:6]
    assert not endless._lock.locked()
    assert torch.equal(_dense_logits(endless), before)


def test_a_failure_in_mid_run_leaves_model_and_lock_as_they_were(endless, monkeypatch):
    before, hooks = _dense_logits(endless), _leftovers(endless)
    ffn, calls = endless.decoder.ffn, []

    def fail(i, x):
        calls.append(i)
        if len(calls) == 3 * endless.spec.layers:
            raise RuntimeError("out of luck")
        return ffn(i, x)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(endless.decoder, "ffn", fail)
        endless.generate(TEXT, sampling=LONG_ANSWER)
    assert not endless._lock.locked()
    assert torch.equal(_dense_logits(endless), before)
    assert _leftovers(endless) == hooks


def test_runs_leave_nothing_on_the_model(endless):
    before = _leftovers(endless)
    for plan in CUTS:
        endless.generate(TEXT, plan, Sampling(3))
    assert _leftovers(endless) == before


def test_equal_seeds_give_equal_text_and_others_do_not(endless):
    def sample(seed, plan=DENSE):
        torch.manual_seed(seed * 31 + 5)  # the global generator must not matter
        return endless.generate(TEXT, plan, Sampling(30, 1.0, seed=seed)).tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1, Plan(PrefillCut(endless.spec.layers))) == sample(1)


def test_every_end_of_text_id_ends_the_answer(engine, monkeypatch):
    tokens = engine.generate(TEXT, sampling=LONG_ANSWER).tokens
    monkeypatch.setattr(engine, "ends", frozenset([tokens[2]]))
    run = engine.generate(TEXT, sampling=LONG_ANSWER)
    assert run.stop == "end" and run.tokens == tokens[: tokens.index(tokens[2])]


def test_an_answer_may_end_at_once(engine, monkeypatch):
    first = engine.generate(TEXT, sampling=Sampling(1)).tokens[0]
    monkeypatch.setattr(engine, "ends", frozenset([first]))
    run = engine.generate(TEXT)
    assert (run.text, run.new_tokens, run.step_ms, run.decode_ms_per_token, run.stop) == ("", 0, [], None, "end")


def test_numbers_that_are_not_finite_are_reported_and_never_sampled(engine, monkeypatch):
    monkeypatch.setattr(engine.decoder, "head", lambda h: torch.full((1, 1, 97), float("nan")))
    for temperature in (0.0, 1.0):
        with pytest.raises(PopError, match="not finite"):
            engine.generate(TEXT, sampling=Sampling(3, temperature))
    assert not engine._lock.locked()


@pytest.mark.parametrize("text", ["", "   ", "\n\t "])
def test_an_empty_prompt_is_refused(engine, text):
    with pytest.raises(PopError, match="empty"):
        engine.generate(text)


def test_prompt_and_answer_must_fit_the_context(engine):
    with pytest.raises(PopError, match="together at most 128"):
        engine.generate("a " * 60, sampling=Sampling(60))
    with pytest.raises(PopError, match="together at most 128"):
        engine.generate("x" * 100_000)


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(engine):
    with pytest.raises(PopError, match="do not match"):
        engine.token_ids([3, 97])


def test_a_cutoff_beyond_the_model_is_refused(engine):
    with pytest.raises(PopError, match="6 layers, so 1 to 6"):
        engine.generate(TEXT, Plan(PrefillCut(7)))


def test_what_was_skipped_is_what_the_run_says(endless):
    run = endless.generate(TEXT, Plan(PrefillCut(4, sinks=2, boundary=3)), Sampling(2))
    assert (run.layers, run.skipped_layers, run.full_tokens) == (6, 2, 5)
    short = endless.generate("a", Plan(PrefillCut(4, sinks=30, boundary=30)), Sampling(2), chat=False)
    assert (short.skipped_layers, short.full_tokens) == (0, short.prompt_tokens)
    assert "Nothing was skipped" in short.notices[0]


@pytest.mark.parametrize("rescore", ["candidates", "none", "all"])
def test_a_ratio_of_0_is_dense_to_the_last_bit(engine, rescore):
    prompt, continuation = random_ids(15), random_ids(6, seed=4)
    plan = Plan(channels=ChannelPruning(0, rescore=rescore))
    dense, same = (engine.continuation_logits(prompt, continuation, p) for p in (DENSE, plan))
    assert torch.equal(dense, same)
    assert not torch.equal(dense, engine.continuation_logits(prompt, continuation, CHANNELS[0]))


def test_what_was_left_out_is_what_the_run_says(endless):
    spec = endless.spec
    for plan in CHANNELS:
        run, online = endless.generate(TEXT, plan, Sampling(5)), plan.online
        facts = run.channels
        assert facts["ffns"] == sum(len(spec.ffn_widths(i)) for i in range(spec.layers))
        assert (facts["whole_ffns"] > 0) == bool(spec.sparse)  # nine tokens do not reach all experts
        lost = 0
        for i, layer in enumerate(facts["layers"]):
            assert layer["retained"] + layer["candidates"] + layer["pruned"] == sum(spec.ffn_widths(i))
            lost += sum(spec.ffn_widths(i)) - layer["retained"] - layer["chosen"]
            if i in spec.sparse:
                assert len(layer["tokens"]) == len(spec.ffn_widths(i))
                continue
            budget = online.budget(spec.ffn)
            counts = [layer["regions"].count(letter) for letter in "rcp"]
            assert counts == [budget.retained, budget.candidates, budget.pruned]
            kept = [bin(int(bits, 16)).count("1") for bits in layer["kept"]]
            assert kept == [budget.chosen] * (run.new_tokens - 1) * (online.rescore == "candidates")
            assert layer["overlap"] is None or 0 <= layer["overlap"] <= 1
        assert run.removed_share == pytest.approx(3 * spec.hidden * lost / costs.parameters(spec))
        if not spec.sparse:
            assert run.removed_share == pytest.approx(costs.removed_share(spec, online.ratio))
    assert endless.generate(TEXT, DENSE, Sampling(2)).removed_share == 0
    first = endless.generate(TEXT, CHANNELS[0], Sampling(1))  # it comes from the prompt, which is read dense
    assert first.removed_share == 0 and first.tokens == endless.generate(TEXT, DENSE, Sampling(1)).tokens


def test_memory_for_the_slices_is_asked_for_before_anything_runs(engine, monkeypatch):
    slices = costs.sliced_bytes(engine.spec, CHANNELS[0].online, engine.loaded.dtype.itemsize)
    monkeypatch.setattr("pop_core.memory.free_bytes", lambda device: slices - 1)
    with pytest.raises(NotEnoughMemory, match="copy of the channels"):
        next(engine.stream(TEXT, CHANNELS[0], Sampling(1)))
    assert next(engine.stream(TEXT, DENSE, Sampling(1))).tokens
    with pytest.raises(NotEnoughMemory, match="copy of the channels"):
        engine.check(Plan(baseline=Baseline("flap", 0.1)))


def test_teacher_forcing_is_the_stock_forward(engine):
    prompt, continuation = random_ids(15), random_ids(6, seed=4)
    ours = engine.continuation_logits(prompt, continuation, DENSE)
    stock = engine.loaded.model(torch.cat((prompt, continuation), 1)).logits[0, 14:-1]
    assert gap(ours, stock) < 1e-4


def _dense_logits(engine):
    return engine.read(random_ids(12), DENSE, 1)[0].clone()


def _leftovers(engine) -> list:
    """All that a run could leave behind on a model."""
    found = []
    for name, module in engine.loaded.model.named_modules():
        found.append((name, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module))))
    found += [(n, p.requires_grad, p.grad is None, p._version) for n, p in engine.loaded.model.named_parameters()]
    return found


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_offloaded_layers_give_the_same_answers_through_their_modules(family, tmp_path):
    folder = str(tiny_folder(tmp_path / "model", family))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 3 else "disk" for i in range(6)}
    plain = Engine(load_model(folder))
    offloaded = Engine(load_model(folder, device_map=places))
    assert offloaded.loaded.offloaded and not offloaded.readable
    for plan in CUTS:
        assert offloaded.generate(TEXT, plan, Sampling(8)).tokens == plain.generate(TEXT, plan, Sampling(8)).tokens
    for plan in (
        Plan(PrefillCut(2, "fitted")),
        Plan(channels=ChannelPruning(0.4)),
        Plan(baseline=Baseline("flap", 0.4)),
    ):
        with pytest.raises(PopError, match="packed or offloaded"):
            offloaded.generate(TEXT, plan)
    assert offloaded.generate(TEXT, Plan(channels=ChannelPruning(0)), Sampling(3)).removed_share == 0
