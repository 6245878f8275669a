"""Command line: `python -m pop_core generate|compare|quality|importance|bench ...`, what the README measures with.

`--json` prints one JSON object as the last line of stdout. Input that cannot be used is one sentence on stderr and exit
code 2.
"""

import argparse
import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from .errors import Cancelled, PopError
from .plan import (
    BASELINES,
    CANDIDATES,
    FITTED,
    OWN,
    RESCORES,
    WIDTH,
    Baseline,
    ChannelPruning,
    Plan,
    PrefillCut,
    whole_number,
)


class Parser(argparse.ArgumentParser):
    """argparse, with one sentence instead of the usage in front of an error."""

    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        result = options.run(options)
    except PopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Cancelled):
        print("stopped", file=sys.stderr)
        return 130
    print(json.dumps(result, allow_nan=False) if options.json else options.show(result))
    return 0


def build_parser() -> Parser:
    """The five commands and their options."""
    parser = Parser(prog="python -m pop_core", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    generate = _pruning_command(commands, "generate", _generate, "answer a prompt under a plan")
    _prompt_options(generate)
    compare = _pruning_command(commands, "compare", _compare, "answer a prompt dense and under a plan, and time both")
    _prompt_options(compare)
    compare.add_argument("--repeats", type=_count, default=3, help="timed prefills of each variant")

    quality = _pruning_command(commands, "quality", _quality, "KL, loss and agreement on a text")
    _baseline_option(quality)
    quality.add_argument("--text", required=True, metavar="FILE")
    _counts(quality, prompt_tokens=448, new_tokens=64, segments=12)

    importance = _command(commands, "importance", _importance, "how much each layer matters to reading and to writing")
    importance.add_argument("--text", metavar="FILE", help="instead of the bundled calibration text")
    importance.set_defaults(show=_importance_text)
    _counts(importance, samples=32, prompt_tokens=128, new_tokens=32, seed=0)
    importance.add_argument(
        "--ablation", type=_count, nargs="?", const=True, default=0, metavar="N",
        help="really leave out each layer, on all samples or on N of them",
    )  # fmt: skip
    importance.add_argument(
        "--tolerance", type=float, help="share of the prefill importance that a cutoff may skip, such as 0.05"
    )
    importance.add_argument(
        "--recompute", action=argparse.BooleanOptionalAction, help="compute layers again instead of keeping them"
    )

    bench = commands.add_parser("bench", help="speed against the stock forward and the limit")
    benches = bench.add_subparsers(dest="bench", required=True, parser_class=Parser)
    prefill = _pruning_command(benches, "prefill", _bench_prefill, "time to read a prompt")
    _counts(prefill, tokens=1024, repeats=5)
    decode = _pruning_command(benches, "decode", _bench_decode, "time to write a token")
    _counts(decode, prompt_tokens=256, new_tokens=64)
    answer = _pruning_command(benches, "answer", _bench_answer, "time to read a prompt and to write an answer")
    _counts(answer, tokens=1024, new_tokens=64, repeats=3)
    for command in (prefill, decode, answer):
        _baseline_option(command)
    return parser


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help)
    command.set_defaults(run=run, show=_readable)
    command.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, a hub id, a folder or a .gguf file")
    command.add_argument("--device", default="auto")
    command.add_argument("--dtype", default="auto")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return command


def _pruning_command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    """A command that runs a plan."""
    command = _command(commands, name, run, help)
    plan = command.add_argument_group("plan (nothing is left out without --cutoff or --prune-ratio)")
    plan.add_argument("--cutoff", type=_count, help="layers kept for the prompt")
    plan.add_argument("--kv", choices=(OWN, FITTED), default=OWN, help="projections of the skipped layers")
    plan.add_argument("--sinks", type=_count, default=0, help="first tokens that run every layer")
    plan.add_argument("--boundary", type=_count, default=1, help="last tokens that run every layer")
    plan.add_argument("--prune-ratio", type=float, metavar="R", help="share of the FFN channels left out while writing")
    plan.add_argument("--candidate-width", type=float, default=WIDTH, metavar="G", help="share that is chosen by token")
    plan.add_argument("--rescore", choices=RESCORES, default=CANDIDATES, help="channels that each token scores again")
    command.set_defaults(baseline=None)
    return command


def _baseline_option(command) -> None:
    command.add_argument("--baseline", choices=BASELINES, help="another method, at the ratio of --prune-ratio")


def _prompt_options(command) -> None:
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT")
    text.add_argument("--prompt-file", metavar="FILE")
    command.add_argument("--plain", action="store_true", help="no chat template")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    command.add_argument("--max-new-tokens", type=_count, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=_count, default=0)
    command.add_argument("--seed", type=_count, default=0)


def _counts(command, **defaults: int) -> None:
    for name, default in defaults.items():
        command.add_argument("--" + name.replace("_", "-"), type=_count, default=default, help="default %(default)s")


def _count(text: str) -> int:
    try:
        return whole_number(text, "value")
    except PopError:
        kind = "too large" if text.strip().lstrip("-").isdigit() else "not a whole number"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is {kind}") from None


def _generate(options) -> dict:
    engine = _engine(options)
    return engine.generate(_text(options), _plan(options), _sampling(options), _chat(options)).to_dict()


def _compare(options) -> dict:
    from .compare import compare

    result = compare(
        _engine(options),
        _text(options),
        _plan(options),
        sampling=_sampling(options),
        chat=_chat(options),
        repeats=options.repeats,
    )
    return result.to_dict()


def _quality(options) -> dict:
    from . import quality

    engine, counts = _engine(options), (options.prompt_tokens, options.new_tokens, options.segments)
    segments = quality.text_segments(engine, _file(options.text), *counts)
    return quality.measure(engine, segments, options.prompt_tokens, [_plan(options)])[0].to_dict()


def _importance(options) -> dict:
    from . import calibration
    from .analysis import analyse_steps
    from .importance import TOLERANCE, checked_tolerance
    from .quality import text_segments

    tolerance = TOLERANCE if options.tolerance is None else checked_tolerance(options.tolerance)
    text = calibration.read_all() if options.text is None else _file(options.text)
    engine = _load(options)
    counts = options.prompt_tokens, options.new_tokens, options.samples
    samples = text_segments(engine, text, *counts, spread=True)
    with _interruptible() as checkpoint:
        steps = analyse_steps(
            engine,
            samples,
            options.prompt_tokens,
            seed=options.seed,
            ablation=options.samples if options.ablation is True else options.ablation,
            tolerance=tolerance,
            recompute=options.recompute,
            text=options.text or "calibration text, all kinds",
            checkpoint=checkpoint,
        )
        for progress in steps:
            done = f"{progress.phase}: {progress.done} of {progress.total} samples"
            _progress(progress.done / progress.total, done)
        return progress.snapshot().to_dict()


def _importance_text(result: dict) -> str:
    from .importance import speedup_at
    from .importance_table import readable

    cutoff = result["recommended_cutoff"]
    speedup = speedup_at(result["predicted"], cutoff)
    return readable(result, cutoff, result["tolerance"], speedup, result["predicted_tokens"])


@contextmanager
def _interruptible():
    """A checkpoint that Ctrl-C turns into `Cancelled`, so that what was done until then is still printed; a second
    Ctrl-C ends the program at once."""
    pressed = []

    def checkpoint() -> None:
        if pressed:
            raise Cancelled

    def press(*_) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield checkpoint
    finally:
        signal.signal(signal.SIGINT, before)


def _bench_prefill(options) -> dict:
    from .bench import bench_prefill

    return bench_prefill(_engine(options), options.tokens, _plan(options), options.repeats)


def _bench_decode(options) -> dict:
    from .bench import bench_decode

    return bench_decode(_engine(options), options.prompt_tokens, options.new_tokens, _plan(options))


def _bench_answer(options) -> dict:
    from .bench import bench_answer

    return bench_answer(_engine(options), options.tokens, options.new_tokens, _plan(options), options.repeats)


def _plan(options) -> Plan:
    cut = channels = baseline = None
    if options.cutoff is not None:
        cut = PrefillCut(options.cutoff, options.kv, options.sinks, options.boundary)
    if options.baseline is not None:
        if options.prune_ratio is None:
            raise PopError("A baseline needs a ratio: give --prune-ratio too.")
        baseline = Baseline(options.baseline, options.prune_ratio)
    elif options.prune_ratio is not None:
        channels = ChannelPruning(options.prune_ratio, options.candidate_width, options.rescore)
    return Plan(cut, channels, baseline)


def _sampling(options):
    from .sampling import Sampling

    return Sampling(
        options.max_new_tokens, options.temperature, options.top_p, options.top_k, options.seed, tuple(options.stop)
    )


def _chat(options) -> bool | None:
    return False if options.plain else None


def _load(options):
    """The model, with its notices on stderr."""
    from .engine import Engine
    from .loading import load_model

    engine = Engine(load_model(options.model, options.device, options.dtype, progress=_progress))
    for notice in engine.loaded.notices:
        print(notice, file=sys.stderr)
    return engine


def _engine(options):
    """The model, ready for the plan: what is fitted or calibrated on its first use is made here."""
    from . import baselines, kv_fit

    plan, engine = _plan(options), _load(options)
    engine.check(plan)
    kv_fit.ensure(engine, plan, _progress)
    baselines.ensure(engine, plan, _progress)
    return engine


def _text(options) -> str:
    return options.prompt if options.prompt is not None else _file(options.prompt_file)


def _file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PopError(f"The file '{name}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise PopError(f"The file '{name}' is not UTF-8 text.") from None


def _progress(fraction: float, text: str) -> None:
    print(f"\r{fraction:4.0%} {text}", end="" if fraction < 1 else "\n", file=sys.stderr, flush=True)


def _readable(result: dict, indent: str = "") -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_readable(value, indent + '  ')}")
        elif isinstance(value, float):
            lines.append(f"{indent}{name}: {value:.4g}")
        elif not isinstance(value, list) or len(value) <= 4:
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
