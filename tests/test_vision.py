"""Prompts with pictures: parity with the stock forward, the laws of pruning, runs that do not disturb each other."""

from dataclasses import replace

import pytest
import torch
from laws import ROOM, gap
from tiny import random_ids
from tiny_vision import END, IMAGE, SEEING_MAKERS, START, scribble

from pop_core import gates
from pop_core.ablation import ablate, cut_divergence
from pop_core.decode import decode_step
from pop_core.divergence import divergence, mean
from pop_core.engine import Engine
from pop_core.errors import PopError
from pop_core.plan import DENSE, ChannelPruning, Plan, PrefillCut
from pop_core.sampling import Sampling

TOLERANCE = 1e-4
PROMPTS = {
    "one picture": ("text", (24, 16), "text"),
    "picture first": ((16, 24), "text"),
    "picture last": ("text", (16, 16)),
    "two pictures": ((16, 16), "text", (24, 16), "text"),
    "two in a row": ("text", (16, 16), (32, 16), "text"),
    "text only": ("text", "text"),
}
MORE = random_ids(8, seed=9)


class Prompted:
    """The ids of a prompt of text and pictures, its sight, and what the stock forward takes."""

    def __init__(self, engine: Engine, name: str, parts):
        images = [scribble(*size, seed=at) for at, size in enumerate(parts) if size != "text"]
        pixels = engine.eyes.prepare(images) if images else None
        facts, ids = iter(pixels.facts if pixels else ()), []
        for at, part in enumerate(parts):
            ids += (
                random_ids(4, seed=at)[0].tolist() if part == "text" else [START, *[IMAGE] * next(facts)["tokens"], END]
            )
        self.ids, self.engine = torch.tensor([ids]), engine
        self.sight = engine.eyes.look(self.ids, pixels) if pixels else None
        self.tensors = dict(pixels.tensors) if pixels else {}
        self.kinds = "token_type_ids" if name.startswith("gemma") else "mm_token_type_ids"

    def stock(self, more=MORE) -> torch.Tensor:
        """Logits after the prompt and after each token of `more`, `[1 + T, vocab]`."""
        model, ids = self.engine.loaded.model, torch.cat((self.ids, more), dim=1)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None  # what the stock forward keeps of the prompt before
        kinds = {self.kinds: (ids == IMAGE).int()} if self.tensors else {}
        with torch.no_grad():
            logits = model(ids, **kinds, **self.tensors).logits[0, self.ids.shape[1] - 1 :]
        self.engine.eyes.forget()  # other tests have the same model
        return logits

    @torch.inference_mode()
    def ours(self, cut: PrefillCut | None, more=MORE) -> torch.Tensor:
        """The same by our loop, token by token."""
        logits, state = self.engine.read(self.ids, Plan(cut), ROOM, sight=self.sight)
        steps = [
            decode_step(state.decoder, state.cache, state.positions, token, state.ffn) for token in more.split(1, dim=1)
        ]
        return torch.cat([logits, *steps])


def prompted(engines, name: str, kind: str = "two pictures") -> Prompted:
    return Prompted(engines(name), name, PROMPTS[kind])


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_nothing_skipped_is_the_stock_forward(engines, name, kind):
    one = prompted(engines, name, kind)
    assert gap(one.ours(PrefillCut(6)), one.stock()) < TOLERANCE
    assert gap(one.ours(None), one.ours(PrefillCut(6))) == 0


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_skipping_the_last_layer_changes_nothing(engines, name, kind):
    one = prompted(engines, name, kind)
    assert gap(one.ours(PrefillCut(5)), one.ours(None)) < TOLERANCE
    assert gap(one.ours(PrefillCut(3)), one.ours(None)) > 1e-3


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_one_pass_is_two(engines, name):
    """Skip layers for all tokens but the last, then write that one as if it were decoded."""
    one = prompted(engines, name)
    single, engine = one.ours(PrefillCut(3)), one.engine
    with torch.inference_mode():
        _, state = engine.read(one.ids[:, :-1], Plan(PrefillCut(3, boundary=0)), ROOM, sight=cut_short(one.sight))
        tokens = torch.cat((one.ids[:, -1:], MORE), dim=1)
        steps = [decode_step(state.decoder, state.cache, state.positions, t) for t in tokens.split(1, dim=1)]
    assert gap(single, torch.cat(steps)) < TOLERANCE


def cut_short(sight):
    """The sight of a prompt without its last token, which is text."""
    return sight if sight.positions is None else replace(sight, positions=sight.positions[:, :-1])


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_interleaved_runs_are_what_they_are_alone(engines, name):
    prompts = [prompted(engines, name, kind) for kind in ("one picture", "two in a row", "text only")]
    alone = [one.ours(PrefillCut(3)) for one in prompts]
    with torch.inference_mode():
        reads = [one.engine.read(one.ids, Plan(PrefillCut(3)), ROOM, sight=one.sight) for one in prompts]
        found = [[logits] for logits, _ in reads]
        for token in MORE.split(1, dim=1):
            for logits, (_, state) in zip(found, reads, strict=True):
                logits.append(decode_step(state.decoder, state.cache, state.positions, token))
    for logits, expected in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(logits), expected)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_nothing_of_a_run_is_left_on_the_model(engines, name):
    one = prompted(engines, name)
    inner, mark = one.engine.loaded.model.model, torch.tensor([[7]])
    had = hasattr(inner, "rope_deltas")
    if had:
        inner.rope_deltas = mark
    one.engine.look(one.engine.encode("Hi", Sampling(4), None, [scribble(16, 16)]))
    one.ours(PrefillCut(3))
    assert hasattr(inner, "rope_deltas") == had == (not name.startswith("gemma"))
    assert not had or inner.rope_deltas is mark
    one.engine.eyes.forget()


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_a_picture_matters(engines, name):
    """Controls: another picture, and the same one without DeepStack or without its two-dimensional positions."""
    one, expected = prompted(engines, name), prompted(engines, name).ours(None)
    whole = one.sight
    one.sight = replace(whole, features=whole.features.flip(0))
    assert gap(one.ours(None), expected) > 1e-3
    if whole.deepstack:
        one.sight = replace(whole, deepstack=tuple(level * 0 for level in whole.deepstack))
        assert gap(one.ours(None), expected) > 1e-3
    if whole.positions is not None:
        one.sight = replace(whole, positions=None)
        assert gap(one.ours(None), expected) > 1e-3


@pytest.mark.parametrize("name", [n for n in SEEING_MAKERS if n.startswith("qwen3")])
def test_a_cutoff_below_deepstack_is_refused(engines, name):
    one = prompted(engines, name)
    with pytest.raises(PopError, match=r"first 2 layers .* it must be 2 to 6"):
        one.ours(PrefillCut(1))
    one.ours(PrefillCut(2))
    text = prompted(engines, name, "text only")
    assert torch.isfinite(text.ours(PrefillCut(1))).all()


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_gates_of_zero_are_the_pruned_prefill(engines, name):
    one = prompted(engines, name)
    ids, boundary, cutoff = torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1, 3
    gate = gates.ones(one.engine.decoder, ids.shape[1])
    gate[cutoff:, :, :boundary] = 0
    with torch.no_grad():
        logits = gates.gated_logits(one.engine.decoder, ids, boundary, gate, sight=one.sight)[0]
    assert gap(logits, one.ours(PrefillCut(cutoff))) < TOLERANCE


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_leaving_out_a_layer_is_a_gate_of_zero(engines, name):
    one = prompted(engines, name)
    decoder, ids, boundary = one.engine.decoder, torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1
    found = ablate(decoder, ids, boundary, sight=one.sight)
    with torch.no_grad():
        dense = gates.gated_logits(decoder, ids, boundary, sight=one.sight)[0]
        for layer in range(6):
            for stage, where in (("prefill", slice(0, boundary)), ("decode", slice(boundary, None))):
                gate = gates.ones(decoder, ids.shape[1])
                gate[layer, :, where] = 0
                logits = gates.gated_logits(decoder, ids, boundary, gate, sight=one.sight)[0]
                expected = mean(divergence(dense, logits)[0])
                assert getattr(found, f"{stage}_kl")[layer] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_what_a_cutoff_costs_is_what_a_cut_run_costs(engines, name):
    one = prompted(engines, name)
    ids, boundary = torch.cat((one.ids, MORE), 1), one.ids.shape[1] - 1
    found = cut_divergence(one.engine.decoder, ids, boundary, 3, sight=one.sight)
    for cutoff, value in zip(range(3, 6), found, strict=True):
        expected = mean(divergence(one.ours(None), one.ours(PrefillCut(cutoff)))[0])
        assert value == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_channels_are_pruned_after_pictures(engines, name):
    """A ratio of 0 is the dense run; half of the channels are not, but for the first token, which the prompt gives."""
    one = prompted(engines, name)
    engine, dense = one.engine, one.ours(None)
    none, half = (
        engine.continuation_logits(one.ids, MORE, Plan(channels=ChannelPruning(ratio, 0.0)), one.sight)
        for ratio in (0, 0.5)
    )
    assert gap(none, dense[:-1]) < TOLERANCE
    assert gap(half[0], dense[0]) < TOLERANCE
    assert gap(half[1:], dense[1:-1]) > 1e-3


@pytest.mark.parametrize("name", [n for n in SEEING_MAKERS if n.startswith("qwen3")])
def test_a_layer_that_goes_takes_no_level_of_deepstack_with_it(engines, name):
    decoder = engines(name).decoder
    assert decoder.levels == [[], [0], [1], [], [], [], []]
    assert decoder.keeping([0, 2, 3]).levels == [[], [0, 1], [], []]
    assert decoder.keeping([1, 4]).levels == [[0], [1], []]
    one = prompted(engines, name)
    gate = gates.ones(decoder, one.ids.shape[1])
    gate[[0, 4]] = 0
    fewer = Engine.__new__(Engine)
    fewer.__dict__ |= engines(name).__dict__ | {"decoder": decoder.keeping([1, 2, 3, 5])}
    fewer.check = lambda plan, sees: None
    with torch.no_grad():
        expected = gates.gated_logits(decoder, one.ids, one.ids.shape[1] - 1, gate, sight=one.sight)[0]
        assert gap(fewer.read(one.ids, DENSE, 0, sight=one.sight)[0], expected) < TOLERANCE


@pytest.mark.parametrize(
    "cut", [PrefillCut(3, sinks=4), PrefillCut(3, boundary=9), PrefillCut(3, sinks=3, boundary=12)]
)
@pytest.mark.parametrize("name", SEEING_MAKERS)
def test_tokens_of_a_picture_may_run_every_layer(engines, name, cut):
    """Against gates that freeze all other tokens from the cutoff up, which Gemma's both-ways pictures see too."""
    one = prompted(engines, name, "two in a row")
    ids, length = torch.cat((one.ids, MORE), 1), one.ids.shape[1]
    gate = gates.ones(one.engine.decoder, ids.shape[1])
    gate[cut.cutoff :, :, cut.sinks : length - cut.boundary] = 0
    with torch.no_grad():
        logits = gates.gated_logits(one.engine.decoder, ids, length - 1, gate, sight=one.sight)[0]
    assert gap(logits, one.ours(cut)) < TOLERANCE
