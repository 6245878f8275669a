import pytest

from pop_core.errors import PopError
from pop_core.plan import Plan, PrefillCut, whole_number


@pytest.mark.parametrize("plan", [Plan(), Plan(PrefillCut(3)), Plan(PrefillCut(7, "fitted", 4, 16))])
def test_a_plan_survives_json(plan):
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(cutoff=0), "cutoff is 0"),
        (dict(cutoff=float("nan")), "whole number"),
        (dict(cutoff=float("inf")), "whole number"),
        (dict(cutoff=2.5), "whole number"),
        (dict(cutoff="abc"), "whole number"),
        (dict(cutoff=None), "whole number"),
        (dict(cutoff=3, kv="none"), "'own' or 'fitted'"),
        (dict(cutoff=3, sinks=-1), "sinks"),
        (dict(cutoff=3, boundary=-1), "boundary"),
    ],
)
def test_impossible_cuts_are_one_sentence(fields, sentence):
    with pytest.raises(PopError, match=sentence) as caught:
        PrefillCut(**fields)
    assert "\n" not in str(caught.value)


def test_whole_numbers_may_come_as_text_or_float():
    assert PrefillCut("3", sinks=4.0) == PrefillCut(3, sinks=4)


def test_a_plan_is_checked_against_the_model():
    Plan(PrefillCut(6)).check(6)
    with pytest.raises(PopError, match="6 layers, so 1 to 6"):
        Plan(PrefillCut(7)).check(6)


@pytest.mark.parametrize(
    "data", [[], {"layers": 3}, {"prefill": {}}, {"prefill": {"cutoff": 3, "more": 1}}, {"prefill": 3}]
)
def test_unknown_entries_are_refused(data):
    with pytest.raises(PopError):
        Plan.from_dict(data)


def test_whole_numbers_keep_every_digit_and_have_a_limit():
    assert whole_number(2**53 + 1, "seed") == whole_number(str(2**53 + 1), "seed") == 2**53 + 1
    for value in (10**400, 1e300, "1" * 5000, 2**63):
        with pytest.raises(PopError) as caught:
            whole_number(value, "seed")
        assert len(str(caught.value)) < 120
