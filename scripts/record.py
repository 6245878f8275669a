"""Record what the first page shows when it opens: the default example under the default plan.

Run it on a quiet machine: `python scripts/record.py`.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pop_core import Engine, Sampling, kv_fit, load_model, recorded  # noqa: E402
from pop_core.compare import compare  # noqa: E402
from pop_core.forecast import default_plan  # noqa: E402

MODEL, REPEATS = "smollm2", 9


def main() -> None:
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


if __name__ == "__main__":
    main()
