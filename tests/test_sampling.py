import math

import pytest
import torch
from tiny_files import tiny_tokenizer

from pop_core.errors import PopError
from pop_core.sampling import Sampling, TextStream, choose


def draw(logits, **options) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return [choose(torch.tensor([logits]), Sampling(**options), generator).item() for _ in range(200)]


def test_temperature_zero_is_greedy():
    assert set(draw([0.0, 2.0, 1.9])) == {1}


def test_sampling_follows_the_probabilities():
    share = draw([0.0, math.log(3)], temperature=1.0).count(1) / 200
    assert share == pytest.approx(0.75, abs=0.1)


def test_top_k_and_top_p_leave_the_best():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw(logits, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=0.79)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=0.0)) == {0}
    assert set(draw(logits, temperature=1.0)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 10])
def test_any_temperature_gives_probabilities(temperature):
    assert set(draw([-900.0, 2000.0, 1990.0], temperature=temperature)) <= {1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(bad, temperature):
    assert set(draw([0.0, bad, 1.0], temperature=temperature)) == {-1}


@pytest.mark.parametrize(
    "fields",
    [
        dict(max_new_tokens=0),
        dict(max_new_tokens="abc"),
        dict(temperature=-1),
        dict(temperature=math.nan),
        dict(temperature=None),
        dict(top_p=1.5),
        dict(top_k=-1),
        dict(seed=-1),
        dict(seed=2**70),
        dict(stop=(5,)),
    ],
)
def test_impossible_settings_are_one_sentence(fields):
    with pytest.raises(PopError) as caught:
        Sampling(**fields)
    assert "\n" not in str(caught.value)


def test_one_stop_string_needs_no_tuple():
    assert Sampling(stop="ab") == Sampling(stop=("ab", "")) and Sampling(stop=None).stop == ()


def stream(text: str, stop=()) -> tuple[TextStream, list[str]]:
    tokenizer = tiny_tokenizer()
    shown, stream = [], TextStream(tokenizer, tuple(stop))
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        stream.push(token)
        shown.append(stream.text)
        if stream.stopped:
            break
    return stream, shown


def test_text_grows_and_is_whole_at_the_end():
    text = "the cat, the dog"
    result, shown = stream(text)
    assert all(text.startswith(part) for part in shown)
    assert result.finish() == text


def test_a_stop_string_ends_the_text_and_never_shows():
    result, shown = stream("one two END three", stop=["END", "never"])
    assert result.stopped and result.finish() == "one two "
    assert not any("E" in part for part in shown)


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end():
    result, shown = stream("one EN", stop=["END"])
    assert shown[-1] == "one " and result.finish() == "one EN"
