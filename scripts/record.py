"""Record what the pages show when they open; each result says on what, when and with which command.

`python scripts/record.py [compare]`: the default example under the default plan; wants a quiet machine.
`python scripts/record.py importance MODEL [ABLATED]`: 200 samples, layers left out on ABLATED of them (all by default).
`python scripts/record.py channels MODEL`: the model's first example under the default channel pruning; quiet machine.
`python scripts/record.py scenes shapes-vl`: exact answers, KL and agreement of many plans on 120 held-out scenes.
"""

import argparse
import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pop_core import ChannelPruning, Engine, Plan, PrefillCut, Sampling, kv_fit, load_model, recorded  # noqa: E402
from pop_core.__main__ import build_parser  # noqa: E402
from pop_core.channel_study import study  # noqa: E402
from pop_core.compare import compare  # noqa: E402
from pop_core.forecast import default_plan  # noqa: E402
from pop_core.plan import FITTED  # noqa: E402
from pop_core.scene_quality import best_kept, measure_scenes  # noqa: E402
from pop_core.timing import machine  # noqa: E402

MODEL, REPEATS, SAMPLES = "smollm2", 9, 200
RATIO, ANSWER = 0.4, 48
SHAPES = "shapes-vl"
SCENES, RATIOS = 120, (0.2, 0.4, 0.6)
EXAMPLES = {"stories-moe": "assets/models/stories-moe/examples.json"}  # of models that know only their own world
READ = {"stories-moe": ["--text", "assets/heldout/stories.txt"], "shapes-vl": ["--scenes"]}


def record_comparison() -> None:
    """Fit what the plan needs, compare, save."""
    example = json.loads((ROOT / "assets" / "examples.json").read_text(encoding="utf-8"))[0]
    engine = Engine(load_model(MODEL))
    plan = default_plan(engine.spec.layers)
    kv_fit.ensure(engine, plan, lambda fraction, text: print(f"\r{fraction:4.0%} {text}", end="", file=sys.stderr))
    sampling = Sampling(max_new_tokens=example["max_new_tokens"])
    result = compare(engine, example["prompt"], plan, sampling=sampling, repeats=REPEATS).to_dict()
    path = recorded.RECORDED / f"compare-{MODEL}.json"
    recorded.save(path, result, engine.spec, "python scripts/record.py")
    print(f"{path.relative_to(ROOT)}: prefill {result['prefill_speedup']:.2f}x, agreement {result['agreement']:.0%}")


def record_importance(model: str, ablated: int) -> None:
    """Run the command that is kept with the result."""
    arguments = ["importance", "--model", model, "--samples", str(SAMPLES), "--ablation", str(ablated)]
    arguments += READ.get(model, [])
    options = build_parser().parse_args(arguments)
    result = options.run(options)
    path = recorded.RECORDED / f"importance-{model}.json"
    recorded.save(path, result, load_model(model).spec, " ".join(["python -m pop_core", *arguments]))
    print(f"{path.relative_to(ROOT)}: cutoff {result['recommended_cutoff']}, Spearman {result['spearman_prefill']:.3f}")


def record_channels(model: str) -> None:
    """The study that the page Channels opens with."""
    examples = json.loads((ROOT / EXAMPLES.get(model, "assets/examples.json")).read_text(encoding="utf-8"))
    example = next((entry for entry in examples if entry.get("model") == model), examples[0])
    images = [ROOT / "assets" / name for name in example.get("images", ())]
    engine = Engine(load_model(model))
    plan, sampling = Plan(channels=ChannelPruning(RATIO)), Sampling(max_new_tokens=ANSWER)
    result = study(engine, example["prompt"], plan, sampling=sampling, images=images).to_dict()
    path = recorded.RECORDED / f"channels-{model}.json"
    recorded.save(path, result, engine.spec, f"python scripts/record.py channels {model}")
    told = ", ".join(f"{row['title']} {row['kl']:.2f}" for row in result["methods"][1:])
    print(f"{path.relative_to(ROOT)}: KL {told}")


def record_scenes(model: str) -> None:
    """What reading with fewer layers, writing with fewer channels, and both cost in answers about pictures."""
    engine = Engine(load_model(model))
    cutoffs = range(engine.spec.layers - 1, engine.spec.deepstack - 1, -1)
    tail = default_plan(engine.spec.layers).prefill
    plans = [Plan(PrefillCut(c)) for c in cutoffs]
    plans += [Plan(PrefillCut(c, FITTED)) for c in cutoffs]
    plans += [Plan(replace(tail, cutoff=c)) for c in cutoffs]
    plans += [Plan(channels=ChannelPruning(ratio)) for ratio in RATIOS]
    plans += [Plan(tail, ChannelPruning(ratio)) for ratio in RATIOS]
    for plan in plans:
        kv_fit.ensure(engine, plan)
    found = measure_scenes(
        engine, SCENES, plans, progress=lambda fraction, text: print(f"\r{text}", end="", file=sys.stderr)
    )
    result = {
        "plans": [entry.to_dict() for entry in found],
        "machine": machine(engine.loaded.device),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    path = recorded.RECORDED / f"scenes-{model}.json"
    recorded.save(path, result, engine.spec, f"python scripts/record.py scenes {model}")
    best = best_kept(result["plans"], tail.cutoff)
    print(f"{path.relative_to(ROOT)}: dense {best['accuracy_dense']:.3f}, cutoff {tail.cutoff} {best['accuracy']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="compare", choices=("compare", "importance", "channels", "scenes"))
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("ablated", nargs="?", type=int, default=SAMPLES)
    chosen = parser.parse_args()
    if chosen.what == "compare":
        record_comparison()
    elif chosen.what == "scenes":
        record_scenes(chosen.model)
    elif chosen.what == "channels":
        record_channels(chosen.model)
    else:
        record_importance(chosen.model, chosen.ablated)


if __name__ == "__main__":
    main()
