"""Prefill-only pruning on a GPU: parity at tiny shapes, then speed at real ones with random weights.

    python scripts/gpu_check.py                 # Llama-3.1-8B and Gemma-3-12B shapes, batch 8, 2,048 tokens
    python scripts/gpu_check.py --device cpu --scale 16 --tokens 256 --batch 2     # the same script on a laptop

Needs neither Gradio nor a checkpoint. Prints one JSON object a line.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from laws import gap  # noqa: E402
from tiny import MAKERS, random_ids, tiny_model  # noqa: E402

from pop_core import costs  # noqa: E402
from pop_core.cache import KVCache  # noqa: E402
from pop_core.decode import StaticStep  # noqa: E402
from pop_core.decoder import Decoder, Positions  # noqa: E402
from pop_core.families import read_spec  # noqa: E402
from pop_core.kv_projection import own_projection  # noqa: E402
from pop_core.plan import Plan, PrefillCut  # noqa: E402
from pop_core.prefill import prefill  # noqa: E402
from pop_core.run import median  # noqa: E402
from pop_core.timing import interleaved, speedup, spread  # noqa: E402

STEPS = 16  # decode steps timed


def shapes(scale: int) -> dict:
    """The two configs; `scale` divides widths and depth, for a machine without a GPU."""
    llama = LlamaConfig(
        vocab_size=128256 // scale,
        hidden_size=4096 // scale,
        intermediate_size=14336 // scale,
        num_hidden_layers=max(6, 32 // scale),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128 // scale,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    gemma = Gemma3TextConfig(
        vocab_size=262208 // scale,
        hidden_size=3840 // scale,
        intermediate_size=15360 // scale,
        num_hidden_layers=max(6, 48 // scale),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256 // scale,
        sliding_window=1024,
        query_pre_attn_scalar=256 // scale,
    )
    return {"Llama-3.1-8B shape": llama, "Gemma-3-12B shape": gemma}


def read(decoder: Decoder, ids: torch.Tensor, cut=None, project=None, room: int = 0):
    """Prefill `[B, N]`; logits, cache and positions."""
    capacity = ids.shape[1] + room
    cache = KVCache(decoder.spec, len(ids), capacity, decoder.devices, decoder.dtype)
    positions = Positions.build(decoder, capacity, ids.device)
    return prefill(decoder, cache, positions, ids, cut, project), cache, positions


def parity(device: torch.device) -> dict:
    """Largest difference from the stock forward in float32, over prefill and decode, for every tiny family."""
    worst = {}
    for name in MAKERS:
        model = tiny_model(name).to(device)
        decoder = Decoder(model, read_spec(model.config))
        ids, more = random_ids(21).to(device), random_ids(10, seed=2).to(device)
        stock = model(torch.cat((ids, more), 1)).logits[:, 20:]
        lossless = decoder.spec.layers - 1
        for cut in (None, PrefillCut(lossless)):
            first, cache, positions = read(decoder, ids, cut, own_projection(decoder, lossless), room=10)
            step = StaticStep(decoder, cache, positions)
            if device.type == "cuda":
                step.capture()
            rest = [step(more[:, t : t + 1]).clone() for t in range(10)]
            worst[name] = max(worst.get(name, 0.0), gap(torch.stack([first, *rest], 1), stock))
    return {"parity": worst, "holds": max(worst.values()) < 1e-3}


def speed(name: str, config, device: torch.device, batch: int, tokens: int, repeats: int) -> dict:
    """Prefill of stock, dense and a third skipped; then decode of stock, dense and (on CUDA) the captured step."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    decoder = Decoder(model, read_spec(model.config))
    layers = decoder.spec.layers
    cut = PrefillCut(layers - layers // 3)
    project = own_projection(decoder, cut.cutoff)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
    tasks = {
        "stock": lambda: model(ids, use_cache=True, logits_to_keep=1),
        "dense": lambda: read(decoder, ids),
        "plan": lambda: read(decoder, ids, cut, project),
    }
    times = interleaved(tasks, repeats, device)
    limit = costs.prefill_limit(decoder.spec, tokens, Plan(cut))
    against_dense = speedup(times["dense"], times["plan"])
    return {
        "model": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "batch": batch,
        "tokens": tokens,
        "skipped_layers": f"{layers - cut.cutoff} of {layers}",
        "prefill_ms": {key: round(median(value), 2) for key, value in times.items()},
        "spread": {key: spread(value) for key, value in times.items()},
        "speedup_vs_stock": speedup(times["stock"], times["plan"]),
        "speedup_vs_dense": against_dense,
        "limit_speedup": limit,
        "fraction_of_limit": against_dense / limit,
        "decode_ms": {key: round(median(value), 3) for key, value in decode_times(model, decoder, ids, device).items()},
    }


def decode_times(model, decoder: Decoder, ids: torch.Tensor, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of single steps after the prompt, greedy token read back each time."""
    tasks, names = {}, ["dense", "dense, CUDA graph"] if device.type == "cuda" else ["dense"]
    for name in names:
        logits, cache, positions = read(decoder, ids, room=STEPS + 4)
        step = StaticStep(decoder, cache, positions, batch=len(ids))
        if "graph" in name:
            step.capture()
        token = logits.argmax(-1, keepdim=True)
        tasks[name] = lambda step=step, token=token: step(token).argmax(-1).tolist()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    tasks["stock"] = lambda: model(token, cache=out.cache, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    return interleaved(tasks, STEPS, device)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divide the shapes by this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is available; use --device cpu --scale 16", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    checked = parity(device)
    print(json.dumps(checked), flush=True)
    for name, config in shapes(options.scale).items():
        print(json.dumps(speed(name, config, device, options.batch, options.tokens, options.repeats)), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if checked["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
