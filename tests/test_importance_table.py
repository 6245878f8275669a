"""The table, the CSV and the report of an analysis: nothing is blank in silence, nothing becomes code."""

import io
import math
import re

import pandas
import pytest
from test_importance_plots import CASES, KEYS, changed, every, made

from pop_core import importance
from pop_core.importance_table import ABLATED, NAMES, csv_bytes, display_rows, neutral, report_html


def read(result: dict) -> pandas.DataFrame:
    return pandas.read_csv(io.BytesIO(csv_bytes(result)), encoding="utf-8-sig")


def cells(result: dict, name: str) -> list[str]:
    """One column as it is shown."""
    names, rows = display_rows(result)
    return [row[names.index(NAMES[name])] for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_a_row_a_layer_and_no_blank_cell(name):
    result = CASES[name]
    names, rows = display_rows(result)
    assert len(rows) == len(read(result)) == len(result["layers"])
    assert all(len(row) == len(names) and all(row) for row in rows)


def test_numbers_come_back_exactly():
    result = made()
    result["layers"][0]["prefill_ffn"], result["ablation"]["prefill_influence"][0] = 1 / 3, -0.125
    back = read(result)
    for key in (*KEYS, "prefill_se", "decode_se"):
        assert list(back[key]) == [entry[key] for entry in result["layers"]]
    assert back["ratio"].tolist() == importance.ratios(result["layers"]) and back["ratio"].iloc[-1] == math.inf
    assert back["skipped_share"].tolist() == importance.skipped_share(result["layers"])[:-1]
    assert back["prefill_influence"][0] == -0.125
    assert back["cut_kl"].isna().tolist() == [True] * 3 + [False] * 3


def test_ablation_has_columns_only_where_it_was_measured():
    assert set(ABLATED) <= set(read(made()).columns)
    assert not set(ABLATED) & set(read(made(ablation=False)).columns)


def test_unknown_unmeasured_infinite_and_zero_differ():
    result = changed(changed(made(), 1, None), 2, 0.0)
    assert cells(result, "prefill_ffn")[1:3] == ["NaN", "0"]
    assert cells(result, "ratio")[1:3] == ["NaN", "n/a"] and cells(result, "ratio")[-1] == "∞"
    assert cells(result, "skipped_share") == ["NaN"] * 6
    assert cells(every(made(), 0.0), "skipped_share") == ["n/a"] * 6
    assert cells(result, "cut_kl")[0] == "n/a"
    assert cells(result | {"cut_kl": [{"cutoff": 0, "kl": None}]}, "cut_kl")[0] == "NaN"
    lines = csv_bytes(result).decode("utf-8-sig").splitlines()
    header, unknown, zero = (lines[i].split(",") for i in (0, 2, 3))
    assert unknown[header.index("prefill_ffn")] == "NaN" and zero[header.index("ratio")] == ""
    assert lines[-1].split(",")[header.index("ratio")] == "inf"


def test_a_standard_error_of_one_sample_was_not_measured():
    result = changed(made(), 1, None, ("prefill_se",))
    assert cells(result, "prefill_se")[1] == "n/a"
    assert cells(changed(result, 1, None), "prefill_se")[1] == "NaN"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_is_a_formula(start):
    text = f'{start}HYPERLINK("http://x","y")'
    result = made() | {"model": text, "text": text}
    assert neutral(text) == f"'{text}"
    assert b"\"'" in csv_bytes(result) or b"'=" in csv_bytes(result)
    assert (read(result)["text"] == f"'{text}").all()


def test_other_text_survives():
    text = 'a "quoted", text\nof two lines 🙂 – é 中'
    result = made() | {"model": "Qwen/Qwen3", "text": text}
    assert csv_bytes(result).startswith(b"\xef\xbb\xbfmodel,text,layer,")
    assert (read(result)["text"] == text).all() and (read(result)["model"] == "Qwen/Qwen3").all()


def test_the_report_is_one_file_with_everything():
    page = report_html(made(), 3, 0.05, 1.4, 512)
    assert page.count('class="figure"') == 4 and page.count("<h1>") == 1 and "color-scheme: light dark" in page
    assert 4e6 < len(page) < 7e6  # plotly.js, once
    assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)=["\']?(?:https?:)?//', page)
    assert "Layers 3-5 carry" in page and "1.40× as fast" in page and "12 samples" in page


def test_nothing_in_a_report_becomes_code():
    evil = "</script><script>alert(1)</script>"
    result = made(tokens=4) | {"model": evil, "text": evil, "machine": evil, "notices": [evil]}
    result["token_map"]["pieces"] = [evil, "<img src=x onerror=alert(1)>", "</script>", "<!--"]
    page, plain = report_html(result, 3, 0.05, None, 512), report_html(made(tokens=4), 3, 0.05, None, 512)
    for pattern in (r"<script", r"</script", r"<!--", r"<img"):
        assert len(re.findall(pattern, page)) == len(re.findall(pattern, plain))
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("name", ["one", "two", "no ablation", "all 0", "all unknown", "empty map"])
def test_a_report_of_anything(name):
    for cutoff in (None, 1):
        assert report_html(CASES[name], cutoff, 0.05, None, 512).rstrip().endswith("</html>")
