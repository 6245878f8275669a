"""Laws of the single pass, in every family: parity, losslessness, equality with the paper's two passes."""

import pytest
import torch
from laws import Subject, gap
from tiny import WINDOW, random_ids

from pop_core.cache import KVCache
from pop_core.decode import decode_step
from pop_core.decoder import Positions
from pop_core.errors import Cancelled
from pop_core.kv_projection import ModuleProjection, own_projection, unit_rms
from pop_core.plan import PrefillCut
from pop_core.prefill import prefill

LONG = 3 * WINDOW - 3  # longer than the sliding window
TOLERANCE = 1e-4


@pytest.mark.parametrize("length", [1, 2, WINDOW, LONG])
def test_cutoff_l_is_the_stock_forward(subject, length):
    ids, more = random_ids(length), random_ids(WINDOW + 3, seed=2)
    stock = subject.stock(torch.cat((ids, more), dim=1))[:, length - 1 :]
    ours = subject.write(subject.read(ids, PrefillCut(subject.layers)), more)
    assert gap(ours, stock) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, LONG])
@pytest.mark.parametrize("sinks", [0, 2])
def test_cutoff_before_the_last_layer_loses_nothing(subject, length, sinks):
    ids, more = random_ids(length), random_ids(4, seed=2)
    dense = subject.write(subject.read(ids), more)
    assert gap(subject.write(subject.read(ids, PrefillCut(subject.layers - 1, sinks=sinks)), more), dense) < TOLERANCE


@pytest.mark.parametrize("cutoff", [1, 3, 5])
def test_one_pass_is_two_passes(subject, cutoff):
    ids, more = random_ids(LONG), random_ids(4, seed=2)
    single = subject.write(subject.read(ids, PrefillCut(cutoff)), more)
    # the paper: prune the first N-1 tokens, then decode token N with the full model
    _, cache, positions = subject.read(ids[:, :-1], PrefillCut(cutoff, boundary=0))
    first = decode_step(subject.decoder, cache, positions, ids[:, -1:])
    assert gap(single, subject.write((first, cache, positions), more)) < TOLERANCE


@pytest.mark.parametrize("cut", [None, PrefillCut(3), PrefillCut(2, sinks=2, boundary=3), PrefillCut(4, boundary=6)])
def test_left_padded_batch_equals_solo_runs(subject, cut):
    lengths = [4, LONG, 1, WINDOW + 2]
    ids, more = random_ids(LONG, batch=4), random_ids(5, batch=4, seed=2)
    pad = torch.tensor([LONG - n for n in lengths])
    batch = subject.write(subject.read(ids, cut, pad), more)
    assert torch.isfinite(batch).all()
    for row, length in enumerate(lengths):
        solo = subject.write(subject.read(ids[row : row + 1, LONG - length :], cut), more[row : row + 1])
        assert gap(batch[row : row + 1], solo) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cut", [None, PrefillCut(3, sinks=1, boundary=2)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_gives_no_nan_in_half_precision(family, cut, dtype):
    """A row that is mostly padding, where a softmax over nothing would be NaN."""
    subject = Subject(family, dtype)
    ids, more, pad = random_ids(30, batch=2), random_ids(4, batch=2, seed=2), torch.tensor([29, 0])
    assert torch.isfinite(subject.write(subject.read(ids, cut, pad), more)).all()


def test_dense_batch_equals_the_stock_forward_alone(subject):
    ids = random_ids(LONG, batch=2)
    pad = torch.tensor([LONG - 5, 0])
    ours, _, _ = subject.read(ids, None, pad)
    assert gap(ours[:1], subject.stock(ids[:1, LONG - 5 :])[:, -1]) < TOLERANCE
    assert gap(ours[1:], subject.stock(ids[1:])[:, -1]) < TOLERANCE


@pytest.mark.parametrize("cutoff", [2, 5])
def test_own_keys_and_values_at_the_first_skipped_layer_are_the_dense_ones(subject, cutoff):
    """The first skipped layer is fed the very hidden state it expects, so its cache must not know the difference."""
    ids = random_ids(LONG)
    _, dense, _ = subject.read(ids)
    _, pruned, _ = subject.read(ids, PrefillCut(cutoff))
    assert pruned.view(cutoff)[0].shape == dense.view(cutoff)[0].shape
    assert gap(pruned.view(cutoff)[0], dense.view(cutoff)[0]) < 1e-5
    assert gap(pruned.view(cutoff)[1], dense.view(cutoff)[1]) < 1e-5


def test_calling_modules_equals_the_folded_product(subject):
    """Packed and offloaded layers go through their modules; the answer is the same."""
    ids, cut = random_ids(LONG), PrefillCut(2, sinks=1, boundary=2)
    assert gap(subject.read(ids, cut)[0], subject.read(ids, cut, project=ModuleProjection())[0]) < TOLERANCE


def test_the_boundary_token_is_load_bearing(subject):
    ids = random_ids(LONG)
    dense = subject.read(ids)[0]
    with_boundary, without = (gap(subject.read(ids, PrefillCut(3, boundary=b))[0], dense) for b in (1, 0))
    assert without > with_boundary + 0.01


def test_the_projection_is_load_bearing(subject):
    """Empty keys and values instead of projected ones move the answer further from dense."""

    class Nothing(ModuleProjection):
        def __call__(self, decoder, h, rope):
            filled = super().__call__(decoder, h, rope)
            return lambda i: tuple(torch.zeros_like(part) for part in filled(i))

    ids, cut = random_ids(LONG), PrefillCut(3)
    projected, emptied = subject.read(ids, cut)[0], subject.read(ids, cut, project=Nothing())[0]
    assert gap(projected, emptied) > 0.01


@pytest.mark.parametrize("cut", [PrefillCut(1), PrefillCut(3, sinks=4, boundary=16)])
def test_a_prompt_of_full_tokens_is_dense(subject, cut):
    """One token, or fewer than sinks and boundary: there is nothing to skip."""
    ids = random_ids(cut.sinks + cut.boundary)
    assert torch.equal(subject.read(ids, cut)[0], subject.read(ids)[0])


def test_every_layer_holds_exactly_the_positions_seen(subject):
    ids, more = random_ids(LONG), random_ids(3, seed=2)
    state = subject.read(ids, PrefillCut(2, sinks=1, boundary=2))
    assert state[1].lengths == [LONG] * subject.layers
    subject.write(state, more)
    assert state[1].lengths == [LONG + 3] * subject.layers


def test_a_checkpoint_can_abandon_a_prefill_and_leaves_nothing():
    subject, ids, calls = Subject("llama"), random_ids(9), []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise Cancelled

    before = subject.read(ids)[0]
    cache = KVCache(subject.decoder.spec, 1, 20, subject.decoder.devices, subject.decoder.dtype)
    positions = Positions.build(subject.decoder, 20, ids.device)
    with pytest.raises(Cancelled):
        prefill(subject.decoder, cache, positions, ids, checkpoint=stop)
    assert len(calls) == 3
    assert torch.equal(subject.read(ids)[0], before)


def test_folded_projection_is_one_matrix_for_all_skipped_layers(subject):
    spec = subject.decoder.spec
    projection = own_projection(subject.decoder, 2)
    assert projection.weight.shape == ((spec.layers - 2) * 2 * spec.kv_width, spec.hidden)
    assert (projection.bias is not None) == (subject.model.model.layers[0].self_attn.k_proj.bias is not None)
    assert unit_rms(torch.randn(3, spec.hidden), 0.0).pow(2).mean(-1) == pytest.approx([1.0] * 3)
