"""The options of the command line, and the plan and the sampling that they stand for."""

import argparse
import sys

from .errors import PopError
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


def build_parser(runs: dict, shows: dict) -> Parser:
    """The commands and their options. runs: what each command does, by its name; shows: how its result is printed."""
    parser = Parser(prog="python -m pop_core", description="POP Studio's inference core: run, compare and measure.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    generate = _pruning_command(commands, "generate", "answer a prompt under a plan")
    _prompt_options(generate)
    compare = _pruning_command(commands, "compare", "answer a prompt dense and under a plan, and time both")
    _prompt_options(compare)
    compare.add_argument("--repeats", type=_count, default=3, help="timed prefills of each variant")

    quality = _pruning_command(commands, "quality", "KL, loss and agreement on a text, or exact answers about pictures")
    _baseline_option(quality)
    held_out = quality.add_mutually_exclusive_group(required=True)
    held_out.add_argument("--text", metavar="FILE")
    held_out.add_argument("--scenes", type=_count, metavar="N", help="generated pictures, each with several questions")
    _counts(quality, of_a_text=True, prompt_tokens=448, new_tokens=64, segments=12)
    _image_options(quality)

    importance = _command(commands, "importance", "how much each layer matters to reading and to writing")
    read = importance.add_mutually_exclusive_group()
    read.add_argument("--text", metavar="FILE", help="instead of the bundled calibration text")
    read.add_argument("--prompt", metavar="TEXT", help="one prompt, its answer written by the model itself")
    read.add_argument("--scenes", action="store_true", help="generated pictures with questions, for a model that sees")
    _image_options(importance)
    _counts(importance, samples=32, new_tokens=32, seed=0)
    _counts(importance, of_a_text=True, prompt_tokens=128)
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
    prefill = _pruning_command(benches, "prefill", "time to read a prompt")
    _counts(prefill, repeats=5)
    prefill.add_argument("--tokens", type=_count, help="of text; default 1024, behind pictures 32")
    _image_options(prefill)
    decode = _pruning_command(benches, "decode", "time to write a token")
    _counts(decode, prompt_tokens=256, new_tokens=64)
    answer = _pruning_command(benches, "answer", "time to read a prompt and to write an answer")
    _counts(answer, tokens=1024, new_tokens=64, repeats=3)
    for command in (prefill, decode, answer):
        _baseline_option(command)
    for name, command in _named(commands, benches).items():
        command.set_defaults(run=runs[name], show=shows.get(name, shows[""]))
    return parser


def _named(commands, benches) -> dict:
    """All commands that do something: `quality`, `bench decode`."""
    found = {name: command for name, command in commands.choices.items() if name != "bench"}
    return found | {f"bench {name}": command for name, command in benches.choices.items()}


def _command(commands, name: str, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help)
    command.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, gemma3-270m, stories-moe, shapes-vl, a hub id, a folder or a .gguf file",
    )
    command.add_argument("--device", default="auto")
    command.add_argument("--dtype", default="auto")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return command


def _pruning_command(commands, name: str, help: str) -> argparse.ArgumentParser:
    """A command that runs a plan."""
    command = _command(commands, name, help)
    plan = command.add_argument_group("plan (nothing is left out without --cutoff or --prune-ratio)")
    plan.add_argument("--cutoff", type=_count, help="layers kept for the prompt")
    plan.add_argument("--kv", choices=(OWN, FITTED), default=OWN, help="projections of the skipped layers")
    plan.add_argument("--sinks", type=_count, default=0, help="first tokens that run every layer")
    plan.add_argument("--boundary", type=_count, default=1, help="last tokens that run every layer")
    plan.add_argument("--prune-ratio", type=float, metavar="R", help="share of the FFN channels left out while writing")
    plan.add_argument("--candidate-width", type=float, metavar="G", help=f"share chosen by token, default {WIDTH}")
    plan.add_argument("--rescore", choices=RESCORES, help=f"what each token scores again, default {CANDIDATES}")
    command.set_defaults(baseline=None)
    return command


def _baseline_option(command) -> None:
    command.add_argument("--baseline", choices=BASELINES, help="another method, at the ratio of --prune-ratio")


def _prompt_options(command) -> None:
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT")
    text.add_argument("--prompt-file", metavar="FILE")
    _image_options(command)
    command.add_argument("--plain", action="store_true", help="no chat template")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    command.add_argument("--max-new-tokens", type=_count, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=_count, default=0)
    command.add_argument("--seed", type=_count, default=0)


def _image_options(command) -> None:
    command.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture in front of the text; repeatable"
    )
    command.add_argument(
        "--image-tokens", type=_count, metavar="N", help="that a picture is scaled to, where the model leaves that open"
    )


def _counts(command, of_a_text: bool = False, **defaults: int) -> None:
    """Options that take a number. of_a_text: they mean nothing without one; `counts_of_a_text` has their values."""
    for name, default in defaults.items():
        told = f"of a text; default {default}" if of_a_text else f"default {default}"
        command.add_argument(_flag(name), type=_count, default=None if of_a_text else default, help=told)
    if of_a_text:
        command.set_defaults(of_a_text=defaults)


def counts_of_a_text(options, there_is_one: bool = True) -> dict[str, int]:
    """The counts that only a text has, by name. Raises `PopError` where one is given and there is no text."""
    given = {name: getattr(options, name) for name in options.of_a_text if getattr(options, name) is not None}
    if given and not there_is_one:
        names = " and ".join(map(_flag, given))
        raise PopError(f"Only a text that is cut into samples takes {names}: leave out what this run has no use for.")
    return options.of_a_text | given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(text: str) -> int:
    try:
        return whole_number(text, "value")
    except PopError:
        kind = "too large" if text.strip().lstrip("-").isdigit() else "not a whole number"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is {kind}") from None


def plan_of(options) -> Plan:
    """The plan. Raises `PopError` for what cannot be."""
    cut = channels = baseline = None
    if options.cutoff is not None:
        cut = PrefillCut(options.cutoff, options.kv, options.sinks, options.boundary)
    chosen = {"width": options.candidate_width, "rescore": options.rescore}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if options.prune_ratio is None and (chosen or options.baseline):
        raise PopError("--candidate-width, --rescore and --baseline need a ratio: give --prune-ratio too.")
    if options.baseline is not None:
        if chosen:
            raise PopError("A baseline has no candidates: leave out --candidate-width and --rescore.")
        baseline = Baseline(options.baseline, options.prune_ratio)
    elif options.prune_ratio is not None:
        channels = ChannelPruning(options.prune_ratio, **chosen)
    return Plan(cut, channels, baseline)


def sampling_of(options):
    """The `Sampling`. Raises `PopError` for what cannot be."""
    from .sampling import Sampling  # here: --help needs no torch

    return Sampling(
        options.max_new_tokens, options.temperature, options.top_p, options.top_k, options.seed, tuple(options.stop)
    )
