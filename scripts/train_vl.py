"""Train the bundled model that sees from nothing, or measure the one that is there.

    python scripts/train_vl.py                  train, save to assets/models/shapes-vl, measure
    python scripts/train_vl.py --resume         the same run, from its last checkpoint in the cache; with a larger
                                                --steps, that run made longer
    python scripts/train_vl.py --evaluate       the numbers of the model card

The pictures of step n depend on the seed and n alone, so a run that was interrupted sees what it would have seen.
First the vision tower alone learns to say what is where, through heads that are then thrown away: by answers alone it
told no shapes apart after 500 steps. Then everything learns to answer. The model is in `shapes_model.py`, what it
learns from in `shapes_batches.py`.
"""

import argparse
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from shapes_batches import Batch, Look, batch, contents
from shapes_model import SEED, image_processor, make_tokenizer, new_model
from torch import nn
from training import Optimizer, save_checkpoint, state_to_resume
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pop_core import DENSE, Engine, load_model
from pop_core.embedded import cache_dir
from pop_core.scene_quality import measure_scenes
from pop_core.scenes import COLOURS, SHAPES, draw_scene, picture

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "models" / "shapes-vl"
STEPS, WARM_UP, COOL_DOWN = 2100, 40, 0.4  # the last is the share of the steps in which the rate goes down to nothing
SEEING_STEPS, SEEING_PICTURES = 300, 64  # of the vision tower alone
PICTURES, PARTS = 16, 2  # of a step; that these are computed in
RATES = (1.5e-3, 1.2e-2, 0.05, 1.0)  # AdamW's and Muon's, Muon's weight decay, and where gradients are clipped
EMPTY_WEIGHT = 0.15  # of the many cells without a thing, while seeing is learned
CHECKPOINT_EVERY, REPORT_EVERY, HELD_OUT_SCENES = 100, 25, 400
SINCE: list[tuple[float, float]] = []  # loss and share of right ones of the steps since the last report


def answer_losses(model, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, every answer weighing the same; share of the answers' tokens that were guessed right)."""
    inner, ids = model.model, part.ids
    places = ids == model.config.image_token_id
    seen = inner.get_image_features(part.pixels["pixel_values"], part.pixels["image_grid_thw"], return_dict=True)
    embeddings = inner.get_input_embeddings()(ids).masked_scatter(places[..., None], torch.cat(seen.pooler_output))
    guides = [Guide(inner.language_model.layers[i], head, looks) for (i, head), looks in part.looks.items() if looks]
    hidden = inner.language_model(
        inputs_embeds=embeddings,
        position_ids=part.positions,
        attention_mask=part.mask,
        use_cache=False,
        visual_pos_masks=places,
        deepstack_visual_embeds=[torch.cat(level) for level in seen.deepstack_features],
    ).last_hidden_state
    learn = part.learn[:, 1:] > 0
    logits, targets, weights = model.lm_head(hidden[:, :-1][learn]), ids[:, 1:][learn], part.learn[:, 1:][learn]
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
    loss = loss + sum(guide.loss() for guide in guides)
    return loss, (logits.detach().argmax(-1) == targets).float().mean()


class Guide:
    """Watches a layer in one forward pass of this thread, and tells how far a head is from looking where it should."""

    def __init__(self, layer, head: int, looks: list[Look]):
        self.attention, self.head, self.looks = layer.self_attn, head, looks
        self.thread = threading.get_ident()  # the other half of the step runs in another one
        self.hook = self.attention.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, arguments, options) -> None:
        if threading.get_ident() == self.thread:
            self.hidden, self.turns = options["hidden_states"], options["position_embeddings"]

    def loss(self) -> torch.Tensor:
        """Minus the log of the share of a look's attention that falls on what is wanted, mean over the looks."""
        self.hook.remove()
        shape = (*self.hidden.shape[:2], -1, self.attention.head_dim)
        queries = self.attention.q_norm(self.attention.q_proj(self.hidden).view(shape)).transpose(1, 2)
        keys = self.attention.k_norm(self.attention.k_proj(self.hidden).view(shape)).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *self.turns)
        rows = [look.row for look in self.looks]
        asked = queries[rows, self.head, [look.slot for look in self.looks]]
        scores = (keys[rows, 0] @ asked[:, :, None])[..., 0] * self.attention.scaling
        others, unwanted = torch.ones(2, *scores.shape, dtype=torch.bool)
        for at, look in enumerate(self.looks):
            others[at, look.among] = unwanted[at, look.wanted] = False
        shares = scores.masked_fill(others, -1e9).log_softmax(-1)
        return -shares.masked_fill(unwanted, -1e9).logsumexp(-1).mean()


def rate(step: int, steps: int) -> float:
    """A short warm-up, then constant, then straight down: a longer run differs only from where it goes down."""
    return min((step + 1) / WARM_UP, 1.0, (1 - step / steps) / COOL_DOWN)


def train(steps: int | None, resume: bool, cores: int) -> None:
    """Train and save. `steps`: None for `STEPS`, or for those of the run that is resumed.

    A step's pictures are shared out to `cores` threads, each of which computes alone: operations this small gain
    nothing from being split, and threads that wait for each other stall when other work takes a core.
    """
    torch.set_num_threads(1)
    tokenizer, processor = make_tokenizer(), image_processor()
    model = new_model(tokenizer).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    checkpoint = cache_dir() / "training" / "shapes-vl.pt"
    first, begun, state = 0, time.perf_counter(), state_to_resume(checkpoint, resume)
    with ThreadPoolExecutor(cores) as pool:
        if not state:
            learn_to_see(model, processor, pool, begun)
        optimizer = Optimizer(model, *RATES)
        if state:
            model.load_state_dict(state["model"])
            optimizer.load(state["optimizer"])
            first, steps = state["step"], steps or state["steps"]
            begun -= state["seconds"]
        steps = steps or STEPS

        for step in range(first, steps):

            def losses(rng: random.Random, step=step):
                return answer_losses(model, batch(tokenizer, processor, rng, PICTURES // PARTS, step))

            told = one_step(list(model.parameters()), optimizer, losses, f"{SEED} {step}", rate(step, steps), pool)
            report("answering", step, steps, told, begun)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
                state = dict(model=model.state_dict(), optimizer=optimizer.state(), step=step + 1, steps=steps)
                save_checkpoint(checkpoint, state | {"seconds": time.perf_counter() - begun})
    save(model, tokenizer, processor)


def learn_to_see(model, processor, pool, begun: float) -> None:
    """Teach every output of the vision tower, DeepStack's too, to tell shape and colour of each image token's cell."""
    visual, classes = model.model.visual, (len(SHAPES) + 1, len(COLOURS) + 1)
    heads = nn.ModuleList(nn.Linear(visual.config.out_hidden_size, sum(classes)) for _ in range(4))
    taught = nn.ModuleList([visual, heads])
    optimizer, parameters = Optimizer(taught, *RATES), list(taught.parameters())

    def losses(rng: random.Random):
        scenes = [draw_scene(rng) for _ in range(SEEING_PICTURES // PARTS)]
        pixels = processor([picture(scene) for scene in scenes], return_tensors="pt")
        seen = model.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True)
        targets, found = torch.cat([contents(scene) for scene in scenes]), []
        for level, head in zip((seen.pooler_output, *seen.deepstack_features), heads, strict=True):
            for logits, target in zip(head(torch.cat(level)).split(classes, dim=1), targets.unbind(1), strict=True):
                weights = torch.tensor([EMPTY_WEIGHT] + [1.0] * (logits.shape[1] - 1))
                found.append((F.cross_entropy(logits, target, weights), logits.detach().argmax(1) == target))
        right = [same[target > 0] for (_, same), target in zip(found[:2], targets.unbind(1), strict=True)]
        return sum(loss for loss, _ in found) / len(found), torch.cat(right).float().mean()

    for step in range(SEEING_STEPS):
        told = one_step(parameters, optimizer, losses, f"{SEED} seeing {step}", rate(step, SEEING_STEPS), pool)
        report("seeing", step, SEEING_STEPS, told, begun)


def one_step(parameters: list, optimizer: Optimizer, losses, name: str, scale: float, pool) -> tuple[float, float]:
    """Move `parameters` once; the mean loss and the mean share of what was right. losses: both, of a generator."""

    def part(number: int):
        loss, right = losses(random.Random(f"{name} {number}"))
        return loss.item(), right.item(), torch.autograd.grad(loss, parameters, allow_unused=True)

    told, right, gradients = zip(*pool.map(part, range(PARTS)), strict=True)
    for parameter, *found in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(found).mean(0)
    optimizer.step(scale, pool.map)
    return sum(told) / PARTS, sum(right) / PARTS


def report(what: str, step: int, steps: int, told: tuple[float, float], begun: float) -> None:
    """A line now and then: how it went since the line before."""
    SINCE.append(told)
    if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
        loss, right = (sum(values) / len(SINCE) for values in zip(*SINCE, strict=True))
        SINCE.clear()
        spent = time.perf_counter() - begun
        print(f"{what} {step + 1}/{steps}  loss {loss:.3f}  right {right:.3f}  {spent:.0f} s", flush=True)


def save(model, tokenizer, processor) -> None:
    """The folder that `from_pretrained` reads, in bfloat16."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    processor.save_pretrained(FOLDER)


def evaluate() -> None:
    """Print the numbers of the model card: exact answers of the saved model, in float32, on scenes never trained on."""
    engine = Engine(load_model("shapes-vl", device="cpu", dtype="float32"))
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{engine.loaded.parameters:,} parameters; the folder has {size / 1e6:.1f} MB")
    found = measure_scenes(engine, HELD_OUT_SCENES, [DENSE])[0]
    print(f"exact answers on {found.scenes} held-out scenes: {found.accuracy:.1%} of {found.questions:,} questions")
    for kind, count in found.by_kind.items():
        print(f"  {kind:10} {count['dense']:4} of {count['questions']:4}  {count['dense'] / count['questions']:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"{STEPS} by default; a resumed run keeps its own, unless told")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="measure the saved model and do not train")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    if not options.evaluate:
        train(options.steps, options.resume, options.cores)
    evaluate()


if __name__ == "__main__":
    main()
