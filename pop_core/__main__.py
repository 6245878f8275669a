"""Command line: `python -m pop_core generate|compare|quality|importance|bench ...`, what the README measures with.

`--json` prints one JSON object as the last line of stdout. Input that cannot be used is one sentence on stderr and exit
code 2.
"""

import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from . import options as command_options
from .errors import Cancelled, PopError
from .options import counts_of_a_text, plan_of, sampling_of


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
    result = _without_thumbnails(result)
    print(json.dumps(result, allow_nan=False) if options.json else options.show(result))
    return 0


def build_parser() -> command_options.Parser:
    """The commands, each with what it does."""
    runs = {
        "generate": _generate,
        "compare": _compare,
        "quality": _quality,
        "importance": _importance,
        "bench prefill": _bench_prefill,
        "bench decode": _bench_decode,
        "bench answer": _bench_answer,
    }
    return command_options.build_parser(runs, {"": _readable, "importance": _importance_text})


def _generate(options) -> dict:
    engine = _engine(options)
    run = engine.generate(_text(options), plan_of(options), sampling_of(options), _chat(options), **_pictures(options))
    return run.to_dict()


def _compare(options) -> dict:
    from .compare import compare

    result = compare(
        _engine(options),
        _text(options),
        plan_of(options),
        sampling=sampling_of(options),
        chat=_chat(options),
        repeats=options.repeats,
        **_pictures(options),
    )
    return result.to_dict()


def _quality(options) -> dict:
    from . import quality, scene_quality
    from .samples import text_samples

    if options.scenes is not None:
        if options.image:
            raise PopError("With --scenes the pictures are generated: leave out --image.")
        _pictures(options)
        counts_of_a_text(options, there_is_one=False)
        engine = _engine(options)
        return scene_quality.measure_scenes(engine, options.scenes, [plan_of(options)], progress=_progress)[0].to_dict()
    counts = counts_of_a_text(options).values()
    engine = _engine(options)
    samples = text_samples(engine, _file(options.text), *counts, **_pictures(options), spread=False)
    return quality.measure(engine, samples, [plan_of(options)])[0].to_dict()


def _importance(options) -> dict:
    from .analysis import analyse_steps
    from .importance import TOLERANCE, checked_tolerance

    tolerance = TOLERANCE if options.tolerance is None else checked_tolerance(options.tolerance)
    if options.scenes and options.image:
        raise PopError("With --scenes the pictures are generated: leave out --image.")
    given = None if options.text is None else _file(options.text)
    engine = _load(options)
    with _interruptible() as checkpoint:
        samples, text = _samples(engine, options, given, checkpoint)
        steps = analyse_steps(
            engine,
            samples,
            seed=options.seed,
            ablation=options.samples if options.ablation is True else options.ablation,
            tolerance=tolerance,
            recompute=options.recompute,
            text=text,
            checkpoint=checkpoint,
        )
        for progress in steps:
            done = f"{progress.phase}: {progress.done} of {progress.total} samples"
            _progress(progress.done / progress.total, done)
        return progress.snapshot().to_dict()


def _samples(engine, options, given: str | None, checkpoint) -> tuple[list, str]:
    """What an analysis reads, and its name. given: the text of a file."""
    from . import calibration
    from .samples import image_samples, text_samples

    count, pictures = options.samples, _pictures(options)
    wordless = given is None and calibration.knows_no_text(engine)
    is_text = options.prompt is None and not options.scenes and not wordless
    prompt_tokens = counts_of_a_text(options, is_text)["prompt_tokens"]
    if options.prompt is not None:
        prompt = [(pictures["images"], options.prompt, None)]
        return image_samples(engine, prompt, options.new_tokens, checkpoint, options.image_tokens) * count, "one prompt"
    if wordless and options.image:
        raise PopError("This model knows too few words of the calibration text: give --prompt with the picture.")
    if options.scenes or wordless:
        scenes = calibration.scene_prompts(count)
        return image_samples(engine, scenes, options.new_tokens, checkpoint), "generated pictures with questions"
    text = calibration.read_all() if given is None else given
    samples = text_samples(engine, text, prompt_tokens, options.new_tokens, count, **pictures)
    return samples, options.text or "calibration text, all kinds"


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

    plan = plan_of(options)
    return bench_prefill(_engine(options), options.tokens, plan, options.repeats, **_pictures(options))


def _bench_decode(options) -> dict:
    from .bench import bench_decode

    return bench_decode(_engine(options), options.prompt_tokens, options.new_tokens, plan_of(options))


def _bench_answer(options) -> dict:
    from .bench import bench_answer

    return bench_answer(_engine(options), options.tokens, options.new_tokens, plan_of(options), options.repeats)


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

    plan, engine = plan_of(options), _load(options)
    sees = bool(getattr(options, "image", None)) or getattr(options, "scenes", None) is not None
    engine.check(plan, sees)
    kv_fit.ensure(engine, plan, _progress)
    baselines.ensure(engine, plan, _progress)
    return engine


def _pictures(options) -> dict:
    """The pictures of a command, as keyword arguments. Raises `PopError`."""
    if options.image_tokens is not None and not options.image:
        raise PopError("--image-tokens is about pictures: give --image too.")
    return {"images": options.image, "image_tokens": options.image_tokens}


def _without_thumbnails(result):
    """A result without what only a page shows."""
    if isinstance(result, list):
        return [_without_thumbnails(entry) for entry in result]
    if not isinstance(result, dict):
        return result
    return {name: _without_thumbnails(value) for name, value in result.items() if name != "thumbnail"}


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
