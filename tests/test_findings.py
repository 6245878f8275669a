"""Sentences about an analysis say what its data say, also where that is not what one hopes for."""

import copy
import math

import pytest
from test_importance_plots import CASES, KEYS, changed, every, made

from pop_core import findings, importance
from pop_core.findings import (
    ablation_sentence,
    curve_sentence,
    ending,
    facts,
    layers_sentence,
    percent,
    plain,
    uncertain,
)
from pop_core.token_findings import tokens_sentence


def reversed_layers(result: dict) -> dict:
    """The result with its layers upside down: deep layers read and early ones write."""
    turned = [entry | {"layer": at} for at, entry in enumerate(reversed(result["layers"]))]
    return result | {"layers": turned}


@pytest.mark.parametrize("name", CASES)
def test_every_sentence_can_be_said_of_everything(name):
    result, before = CASES[name], copy.deepcopy(CASES[name])
    for cutoff in (None, 1, len(result["layers"])):
        said = [
            layers_sentence(result, cutoff),
            *(curve_sentence(result, cutoff, 0.05, speedup, 512) for speedup in (None, 1.4)),
            ablation_sentence(result),
            tokens_sentence(result),
            *(value for _, value in facts(result)),
        ]
        assert all(said) and not any(word in text.split() for text in said for word in ("None", "nan", "inf"))
        assert all(text.endswith(".") and ".." not in text for text in said[:5])
    assert result == before


def test_shares_are_those_of_the_layers_from_the_cutoff_up():
    result = made()
    share = importance.skipped_share(result["layers"])[3]
    assert f"Layers 3-5 carry {percent(share)} of the reading importance" in layers_sentence(result, 3)
    assert layers_sentence(result, None) == layers_sentence(result, 6)
    assert "The last third, layers 4-5, carries" in layers_sentence(result, None)
    assert layers_sentence(result, 5).startswith("Layer 5 carries 0% of the reading")


def test_depth_is_described_as_it_is():
    assert "Deep layers lean towards writing" in layers_sentence(made(), 3)
    assert "do not lean towards writing" in layers_sentence(reversed_layers(made()), 3)
    assert "matter more to reading" in layers_sentence(reversed_layers(made()), 3)
    equal = layers_sentence(every(made(), 1.0), 3)
    assert "little difference" in equal and "no difference between reading and writing" in equal


def test_the_zero_of_the_last_layer_is_explained_only_where_it_is_one():
    assert "exactly 0" in layers_sentence(made(), 3)
    assert "exactly 0" not in layers_sentence(changed(made(), 5, 1.0), 3)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("one unknown", "Layer 2 has a value that is not a finite number"),
        ("all unknown", "Layers 0, 1, 2 and 3 more have values"),
        ("all 0", "reading and for writing is exactly 0"),
        ("one", "reading is exactly 0"),
    ],
)
def test_what_is_not_known_is_said(name, part):
    assert part in layers_sentence(CASES[name], 1)


def test_the_recommended_cutoff_is_told_from_another():
    result = made()
    best = importance.recommend(result["layers"], 0.05)
    said = curve_sentence(result, best, 0.05, 1.4, 512)
    assert said.startswith(f"Cutoff {best} is the lowest that skips at most 5% of the reading importance: it skips")
    assert "1.40× as fast at 512 tokens" in said and "own projections on 2 samples" in said
    other = curve_sentence(result, best - 1, 0.05, 1.4, 512)
    assert (
        other.startswith(f"Cutoff {best - 1} skips") and "above the tolerance" in other and f"Cutoff {best} is" in other
    )
    assert "within the tolerance" in curve_sentence(result, best + 1, 0.05, None, 512)
    assert "Arithmetic" not in curve_sentence(result, best, 0.05, None, 512)


def test_the_cost_of_a_cutoff_is_measured_or_not():
    result = made()
    assert "it cost 0.2 nats" in curve_sentence(result, 3, 0.05, 1.2, 512).lower()
    assert "was not measured (cutoffs 3 to 5 were)" in curve_sentence(result, 2, 0.05, 1.2, 512)
    assert "was not measured." in curve_sentence(result | {"cut_kl": []}, 2, 0.05, 1.2, 512)
    unknown = result | {"cut_kl": [{"cutoff": 3, "kl": None}]}
    assert "KL, measured with own projections on 2 samples, is not a finite number" in curve_sentence(
        unknown, 3, 0.05, 1.2, 512
    )


def test_a_cutoff_that_skips_nothing_is_no_gain():
    said = curve_sentence(made(), 6, 0.05, 1.0, 512)
    assert "keeps all 6 layers" in said and "nothing is skipped" in said and "Arithmetic" not in said


@pytest.mark.parametrize(("name", "why"), [("all 0", "exactly 0"), ("one unknown", "layer 2 is not a finite number")])
def test_no_recommendation_says_why(name, why):
    said = curve_sentence(CASES[name], 3, 0.05, 1.2, 512)
    assert said.startswith("No cutoff is recommended") and why in said and "For cutoff 3" in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.8, "nearly alike"),
        (0.79, "agree broadly"),
        (0.5, "agree broadly"),
        (0.49, "do not agree well"),
        (-0.9, "do not agree well"),
        (None, "n/a"),
    ],
)
def test_rank_correlations_are_judged_honestly(value, words):
    result = made() | {"spearman_prefill": value, "spearman_decode": value}
    assert words in ablation_sentence(result).split("A simpler measure")[0]


def test_ablation_names_what_it_rests_on():
    said = ablation_sentence(made())
    assert all(part in said for part in ("6 layers", "2 samples", "0.90", "0.60", "0.70", "ShortGPT"))
    assert "was not measured" in ablation_sentence(made(ablation=False))


def test_the_heaviest_token_and_the_share_of_writing_are_right():
    result = every(made(6, tokens=4), 0.0)
    shown = result["token_map"] | {"pieces": [" a", "<b>", "c", "d"], "first": 10, "boundary": 2}
    shown["attention"][3][1], shown["ffn"][5][0], shown["ffn"][5][3] = 2.0, 1.0, 3.0
    said = tokens_sentence(result | {"token_map": shown})
    assert "“<b>”, number 12, weighs most, most of all in layer 3" in said
    assert "75% of the map's sum" in said and "one sample and one draw" in said
    quiet = every(made(tokens=4), 0.0)
    quiet["token_map"]["ffn"][5][3] = 1.0
    assert "No token of the prompt but the last" in tokens_sentence(quiet)


def test_a_stopped_analysis_says_so():
    assert dict(facts(made()))["Samples"] == "12 samples"
    stopped = dict(
        facts(
            made()
            | {"samples": 1, "requested": 12, "complete": False, "forward_equivalents": None, "stopped_in": "gates"}
        )
    )
    assert (
        stopped["Samples"] == "1 of 12 samples, stopped in the phase of the gates" and stopped["Cost"] == "12 seconds"
    )
    assert ending(made() | {"complete": False, "samples": 1, "stopped_in": "gates"}).endswith("of 1 of 12 samples")
    assert "all 12 samples" in ending(made() | {"complete": False, "stopped_in": "cutoffs"})
    on = made()["ablation"]["samples"]
    assert f"ablation is on {on} sample" in ending(made() | {"complete": False, "stopped_in": "ablation"})
    assert "own analysis of " in ending(made())
    assert dict(facts(made() | {"loss": math.nan}))["Loss of the drawn labels"] == "n/a"


def test_rough_numbers_are_called_rough():
    assert uncertain(made()) == ""
    assert uncertain(made() | {"samples": 3}).startswith("With 3 samples the numbers are rough: the standard error is")
    assert uncertain(made() | {"samples": 1}).startswith("With 1 sample ")
    assert uncertain(made() | {"samples": 3, "distinct": 1}).startswith("All 3 samples are one prompt, ")
    assert uncertain(made() | {"samples": 3, "distinct": 2}) == uncertain(made() | {"samples": 3})
    result = made()
    for layer in range(6):
        result = changed(result, layer, 9.0, ("prefill_se", "decode_se"))
    assert "are rough" in uncertain(result)


def test_shares_are_never_rounded_to_all_or_nothing():
    for share, shown in (
        (0, "0%"),
        (1, "100%"),
        (1e-9, "under 0.1%"),
        (0.9999, "over 99%"),
        (0.05, "5%"),
        (0.039, "3.9%"),
    ):
        assert percent(share) == shown
    assert [plain(v) for v in (0, 0.112, 3.44, 29.2, 1234.5, 1e9)] == ["0", "0.11", "3.4", "29", "1,234", "1.0e+09"]


def test_layers_are_listed_as_people_do():
    assert findings._listed([3]) == "layer 3" and findings._listed([3, 4]) == "layers 3 and 4"
    assert set(KEYS) <= set(made()["layers"][0])
