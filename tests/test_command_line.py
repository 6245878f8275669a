"""The command line: JSON as the last line, one sentence and exit code 2 for what cannot be used."""

import json
import signal
import subprocess
import sys

import pytest
from tiny_files import tiny_folder

from pop_core.__main__ import main

PROMPT = "the old dog sleeps under the tree"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("model"), "qwen3"))


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    """Run a command on the tiny model in this process; returns the parsed JSON of its last line."""
    monkeypatch.setenv("POP_STUDIO_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> dict:
        assert main([*arguments, "--model", folder, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_generate(command):
    result = command("generate", "--prompt", PROMPT, "--max-new-tokens", "5", "--cutoff", "3", "--seed", "2")
    assert {"text", "prompt_tokens", "new_tokens", "prefill_ms", "decode_ms_per_token"} <= set(result)
    assert result["plan"]["prefill"]["cutoff"] == 3 and result["skipped_layers"] == 3


def test_generate_is_repeatable_and_reads_files(command, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    options = ("--temperature", "1", "--seed", "4", "--max-new-tokens", "8")
    first = command("generate", "--prompt", PROMPT, *options)
    assert command("generate", "--prompt-file", str(tmp_path / "prompt.txt"), *options)["tokens"] == first["tokens"]


def test_compare(command):
    result = command("compare", "--prompt", PROMPT, "--max-new-tokens", "6", "--cutoff", "2", "--repeats", "2")
    keys = "dense pruned prefill_speedup decode_speedup first_divergence agreement first_token_kl"
    assert set(keys.split()) <= set(result)
    assert result["dense"]["prefill_ms"] > 0 and result["prefill_speedup"] > 0


def test_quality_fits_on_first_use(command, tmp_path, monkeypatch):
    monkeypatch.setattr("pop_core.calibration.calibration_segments", lambda *_: [list(range(3, 60))] * 3)
    (tmp_path / "text.txt").write_text(PROMPT * 20)
    counts = ("--prompt-tokens", "40", "--new-tokens", "8", "--segments", "2")
    plan = ("--cutoff", "3", "--kv", "fitted", "--sinks", "4")
    result = command("quality", "--text", str(tmp_path / "text.txt"), *counts, *plan)
    assert {"loss_dense", "loss", "kl", "first_token_kl", "agreement", "tokens"} <= set(result)
    assert result["tokens"] == 16 and result["kl"] > 0


def test_bench(command):
    keys = "ms ms_dense ms_stock speedup_vs_dense speedup_vs_stock limit_speedup fraction_of_limit spread"
    prefill = command("bench", "prefill", "--tokens", "50", "--cutoff", "4", "--repeats", "2")
    decode = command("bench", "decode", "--prompt-tokens", "20", "--new-tokens", "5")
    assert set(keys.split()) <= set(prefill) and set(keys.split()) <= set(decode)


CHANNELS = ["--prune-ratio", "0.5", "--candidate-width", "0.2"]


@pytest.mark.parametrize("rescore", ["candidates", "none", "all"])
def test_channels_can_be_pruned_by_every_command_that_writes(command, text, rescore):
    plan, prompt = [*CHANNELS, "--rescore", rescore, "--cutoff", "3"], ["--prompt", PROMPT, "--max-new-tokens", "6"]
    run = command("generate", *prompt, *plan)
    pruning = {"ratio": 0.5, "width": 0.2, "rescore": rescore, "score": "sum"}
    assert run["plan"]["channels"] == pruning and run["plan"]["prefill"]["cutoff"] == 3
    assert run["removed_share"] > 0.1 and run["channels"]["ffns"] == 6
    compared = command("compare", *prompt, *plan, "--repeats", "1")
    assert compared["pruned"]["tokens"] == run["tokens"] and compared["kl"] > 0
    counts = ["--prompt-tokens", "10", "--new-tokens", "4", "--segments", "2"]
    assert command("quality", "--text", text, *counts, *plan)["kl"] > 0


def test_bench_decode_says_what_choosing_channels_costs(command):
    counts = ["--prompt-tokens", "20", "--new-tokens", "5"]
    keys = "scoring_ms slicing_ms rescore_overhead bytes_per_token bytes_per_token_dense partition_steps"
    result = command("bench", "decode", *counts, *CHANNELS)
    assert all(result[key] > 0 for key in (*keys.split(), "ms_fixed_mask", "ms_dense_ffn", "rescore_ms"))
    assert result["bytes_per_token"] < result["bytes_per_token_dense"] and "overhead_vs_fixed_mask" in result
    fixed = command("bench", "decode", *counts, *CHANNELS, "--rescore", "none")
    assert fixed["rescore_ms"] == 0 and fixed["bytes_per_token"] < result["bytes_per_token"]
    everything = command("bench", "decode", *counts, *CHANNELS, "--rescore", "all")
    assert everything["bytes_per_token"] == everything["bytes_per_token_dense"]


@pytest.mark.parametrize("name", ["shortgpt", "wanda-sp", "flap", "griffin"])
def test_baselines_stand_in_the_same_tables(command, text, name, monkeypatch):
    monkeypatch.setattr("pop_core.calibration.calibration_segments", lambda *_: [list(range(3, 60))] * 3)
    baseline = ["--baseline", name, "--prune-ratio", "0.5"]
    counts = ["--prompt-tokens", "10", "--new-tokens", "4"]
    measured = command("quality", "--text", text, *counts, "--segments", "2", *baseline)
    assert measured["kl"] > 0 and measured["plan"]["baseline"] == {"name": name, "ratio": 0.5}
    decode = command("bench", "decode", *counts, *baseline)
    assert decode["bytes_per_token"] < decode["bytes_per_token_dense"]
    answer = command("bench", "answer", "--tokens", "10", "--new-tokens", "4", "--repeats", "2", *baseline)
    assert answer["ms"] > 0 and answer["limit_speedup"] is None and answer["speedup_vs_stock"] > 0
    assert command("bench", "prefill", "--tokens", "10", "--repeats", "1", *baseline)["ms"] > 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--prune-ratio", "0.2", "--candidate-width", "0.9"], "must be 0 to 0.4"),
        (["--prune-ratio", "0.04"], "must be 0 to 0.08"),
        (["--prune-ratio", "1.5"], "from 0 to 1"),
        (["--prune-ratio", "-0.5"], "from 0 to 1"),
        (["--prune-ratio", "nan"], "from 0 to 1"),
        (["--prune-ratio", "much"], "invalid float"),
        (["--prune-ratio", "0.4", "--rescore", "some"], "invalid choice"),
        (["--prune-ratio", "0.4", "--candidate-width", "inf"], "from 0 to 1"),
        (["--baseline", "flap"], "--prune-ratio"),
        (["--candidate-width", "0.2"], "--prune-ratio"),
        (["--rescore", "all"], "--prune-ratio"),
        (["--baseline", "flap", "--prune-ratio", "0.4", "--rescore", "all"], "no candidates"),
        (["--baseline", "magic", "--prune-ratio", "0.4"], "invalid choice"),
        (["--baseline", "flap", "--prune-ratio", "0.4", "--cutoff", "3"], "stands alone"),
    ],
)
def test_channels_that_cannot_be_pruned_are_one_sentence_and_code_2(folder, text, capsys, arguments, sentence):
    try:
        code = main(["quality", "--model", folder, "--text", text, *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert sentence in captured.err.strip().splitlines()[-1] and "Traceback" not in captured.err


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(PROMPT * 3)
    return str(tmp_path / "text.txt")


COUNTS = ["--samples", "3", "--prompt-tokens", "8", "--new-tokens", "4"]


@pytest.mark.parametrize("ablation, ablated", [([], 0), (["--ablation", "2"], 2), (["--ablation"], 3)])
def test_importance(command, text, ablation, ablated):
    result = command("importance", "--text", text, *COUNTS, *ablation, "--tolerance", "0.3", "--recompute")
    assert {"recommended_cutoff", "seconds", "forward_equivalents", "spearman_prefill", "spearman_decode"} <= set(
        result
    )
    assert result["samples"] == 3 and result["complete"] and result["recompute"] and result["tolerance"] == 0.3
    for at, entry in enumerate(result["layers"]):
        branches = ["prefill_attention", "prefill_ffn", "decode_attention", "decode_ffn"]
        assert list(entry) == ["layer", *branches, "prefill_se", "decode_se"] and entry["layer"] == at
    assert len(result["layers"]) == 6 and (result["ablation"] or {"samples": 0})["samples"] == ablated
    assert isinstance(result["spearman_prefill"], float if ablated else type(None))


def test_ctrl_c_prints_the_samples_done(command, text, monkeypatch):
    def press(fraction, message):
        if message.startswith("gates: 2"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("pop_core.__main__._progress", press)
    handler = signal.getsignal(signal.SIGINT)
    try:
        result = command("importance", "--text", text, *COUNTS)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result["samples"] == 2 and not result["complete"]


def test_a_second_ctrl_c_ends_it_at_once(folder, text, monkeypatch):
    def press(fraction, message):
        if message.startswith("gates: 1"):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("pop_core.__main__._progress", press)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["importance", "--model", folder, "--text", text, *COUNTS]) == 130
    assert signal.getsignal(signal.SIGINT) is handler


def test_importance_reads_the_bundled_text_and_can_be_read(folder, capsys):
    assert main(["importance", "--model", folder, *COUNTS, "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Writing / reading" in shown and "is the lowest that skips at most 5%" in shown


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--samples", "0"], "at least 1"),
        (["--samples", "40"], "need at least"),
        (["--samples", "x"], "not a whole number"),
        (["--prompt-tokens", "1"], "at least 2"),
        (["--new-tokens", "0"], "at least 1"),
        (["--prompt-tokens", "127"], "together at most 128"),
        (["--ablation", "4"], "0 to 3"),
        (["--ablation", "-1"], "0 to 3"),
        (["--seed", "-1"], "must not be negative"),
        (["--seed", "9" * 30], "too large"),
        (["--text", ""], "cannot be read"),
        (["--ablation", "half"], "not a whole number"),
        (["--tolerance", "1.5"], "from 0 to 1"),
        (["--tolerance", "nan"], "from 0 to 1"),
        (["--tolerance", "little"], "invalid float"),
        (["--seed", "1.5"], "not a whole number"),
        (["--text", "/no/such/file"], "cannot be read"),
        (["--cutoff", "3"], "unrecognized arguments"),
    ],
)
def test_what_importance_cannot_use_is_one_sentence_and_code_2(folder, text, capsys, arguments, sentence):
    try:
        code = main(["importance", "--model", folder, "--text", text, *COUNTS, *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert sentence in captured.err.strip().splitlines()[-1] and "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "   "], "empty"),
        (["--prompt", "a", "--cutoff", "0"], "at least 1"),
        (["--prompt", "a", "--cutoff", "7"], "6 layers, so 1 to 6"),
        (["--prompt", "a", "--cutoff", "nan"], "not a whole number"),
        (["--prompt", "a", "--cutoff", "2.5"], "not a whole number"),
        (["--prompt", "a", "--cutoff", "3", "--kv", "none"], "invalid choice"),
        (["--prompt", "a", "--max-new-tokens", "500"], "together at most 128"),
        (["--prompt", "a", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt", "a", "--temperature", "nan"], "temperature"),
        (["--prompt", "a", "--top-p", "3"], "top p"),
        (["--prompt", "x" * 100_000], "together at most 128"),
        (["--prompt-file", "/no/such/file"], "cannot be read"),
        (["--prompt", "a", "--device", "warp"], "warp"),
        (["--prompt", "a", "--model", "/no/such/model"], "/no/such/model"),
        ([], "required"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_code_2(folder, capsys, arguments, sentence):
    try:
        code = main(["generate", "--model", folder, *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert sentence in last and "Traceback" not in captured.err


def test_text_that_is_not_text_is_cleaned_and_said(command):
    result = command("generate", "--prompt", "a\x00dog\ud800 </s> runs", "--max-new-tokens", "2")
    assert "replaced" in result["notices"][0] and "</s>" in result["prompt"]


def test_it_runs_as_a_module(folder):
    done = subprocess.run(
        [sys.executable, "-m", "pop_core", "generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "prompt_tokens" in done.stdout
