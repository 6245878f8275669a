"""Train the bundled model that sees from nothing, or measure the one that is there.

    python scripts/train_vl.py                  train, save to assets/models/shapes-vl, measure
    python scripts/train_vl.py --resume         the same run, from its last checkpoint in the cache; with a larger
                                                --steps, that run made longer
    python scripts/train_vl.py --evaluate       the numbers of the model card

The pictures of step n depend on the seed and n alone, so a run that was interrupted sees what it would have seen.
First the vision tower alone learns to say what is where, through heads that are then thrown away: by answers alone it
told no shapes apart after 500 steps. Then everything learns to answer. One pass over a picture serves all questions
about it: they stand behind it one after the other, each with the positions it would have alone, and none sees another.
"""

import argparse
import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from training import Optimizer, save_checkpoint, state_to_resume
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pop_core import DENSE, Engine, load_model
from pop_core.embedded import cache_dir
from pop_core.scene_quality import measure_scenes
from pop_core.scenes import (
    COLOURS,
    GRID,
    NO_PICTURE,
    SHAPES,
    Question,
    Scene,
    draw_scene,
    picture,
    questions,
)

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "models" / "shapes-vl"


SEED, WHITE = 2026, (255, 255, 255)
SIDE, PATCH, MERGE = 96, 8, 2  # pixels of a picture and a patch; patches a side of an image token
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2
SPECIAL = ("<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }} "
    "{%- if message.content is string -%}{{ ' ' + message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'text' -%}{{ ' ' + part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"
)
OTHER_WORDS = ("hello", "hi", "please", "tell", "me", "who", "are", "you", "a", "an", "it", "this", "that", "and",
               "object", "objects", "thing", "things")  # fmt: skip

STEPS, WARM_UP, COOL_DOWN = 2100, 40, 0.4  # the last is the share of the steps in which the rate goes down to nothing
SEEING_STEPS, SEEING_PICTURES = 300, 64  # of the vision tower alone
PICTURES, PARTS = 16, 2  # of a step; that these are computed in
QUESTIONS = 14  # about a picture, the one that is put without it included
RATES = (1.5e-3, 1.2e-2, 0.05, 1.0)  # AdamW's and Muon's, Muon's weight decay, and where gradients are clipped
EMPTY_WEIGHT = 0.15  # of the many cells without a thing, while seeing is learned
CHECKPOINT_EVERY, REPORT_EVERY, HELD_OUT_SCENES = 100, 25, 400
WEIGHTED_FROM, WEIGHTS = 900, {"colour": 3.0, "place": 2.0, "describe": 2.0}  # steps; kinds whose answers weigh more
LOOKING_FROM, LOOKING = 300, (0, 0)  # steps; the layer, and its head, taught to look from a shape's word at that shape
READING_FROM, READING = 1600, (1, 1)  # the same, taught to look from where the answer begins at the shape's word
SINCE: list[tuple[float, float]] = []  # loss and share of right ones of the steps since the last report


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and punctuation of the questions and answers; any other word is `<unk>`."""
    rng, words = random.Random(SEED), set(OTHER_WORDS) | {"user", "assistant", "system", *NO_PICTURE.split()}
    for _ in range(3000):
        for question in questions(draw_scene(rng), rng):
            words |= set(re.findall(r"\w+", f"{question.text} {question.answer}"))
    entries = [*SPECIAL, *(f"▁{word}" for word in sorted(words)), ".", ",", "?", "!"]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\bcolor\b"), "colour")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Brings every picture to about 96 x 96 pixels, whatever its size: that is what the model was trained on."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def new_model(tokenizer) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(SEED)
    special = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
               ("image_pad", "video_pad", "vision_start", "vision_end")}  # fmt: skip
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=12,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(
            depth=4,
            hidden_size=128,
            intermediate_size=384,
            num_heads=4,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=192,
            num_position_embeddings=(SIDE // PATCH) ** 2,
            deepstack_visual_indexes=[1, 2, 3],
        ),
        tie_word_embeddings=True,
        image_token_id=special["image_pad"],
        video_token_id=special["video_pad"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
    )
    return Qwen3VLForConditionalGeneration(config)


def layout(tokenizer):
    """What every example has in common: ids in front of the questions, and ids between question and answer."""
    around = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = around.split(" ?")
    before = before.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS)
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]


@dataclass
class Batch:
    """One part of a step. ids: [pictures, length]; positions: [3, pictures, length]; mask: [pictures, 1, length,
    length]; learn: [pictures, length], the weight of a token's answer over the tokens of that answer, 0 elsewhere.
    looks: what to guide of each (layer, head)."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    learn: torch.Tensor
    pixels: dict
    looks: dict


@dataclass(frozen=True)
class Look:
    """Where a token should look: from its slot, among these slots at those wanted."""

    row: int
    slot: int
    among: list[int]
    wanted: list[int]


def batch(tokenizer, processor, rng: random.Random, pictures: int, step: int) -> Batch:
    """Pictures with the questions about them, and one that is put without a picture.

    A segment is the front (0), a question that sees it, or one (negative) that sees none of it but the role.
    """
    front, between = layout(tokenizer)
    role, end = front.index(tokenizer.convert_tokens_to_ids("<|vision_start|>")), tokenizer.eos_token_id
    front_positions = torch.tensor(positions_of_front(len(front), role))
    first = int(front_positions.max()) + 1
    scenes = [draw_scene(rng) for _ in range(pictures)]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    image = [slot for slot, token in enumerate(front) if token == image_id]
    rows, looks = [], {LOOKING: [], READING: []}
    for scene in scenes:
        ids, segments, positions, learn = list(front), [0] * len(front), [], [0.0] * len(front)
        asked = questions(scene, rng)
        whole = next(q for q in asked if q.kind == "describe")
        others = [q for q in asked if q is not whole][: QUESTIONS - 2]
        for number, question in enumerate([whole, *others, Question("blind", blind_prompt(rng), NO_PICTURE)], 1):
            blind = question.kind == "blind"
            asking = tokenizer(" " + question.text, add_special_tokens=False).input_ids + between
            reply = [*tokenizer(" " + question.answer, add_special_tokens=False).input_ids, end]
            start, length = role if blind else first, len(asking) + len(reply)
            if step >= LOOKING_FROM and (shape := shape_sought(question)):
                word = len(ids) + asking.index(tokenizer.convert_tokens_to_ids(f"▁{shape}"))
                thing = next(thing for thing in scene.things if thing.shape == shape)
                cells = contents(Scene((thing,), WHITE))[:, 0].tolist()
                wanted = [slot for slot, cell in zip(image, cells, strict=True) if cell]
                looks[LOOKING].append(Look(len(rows), word, image, wanted))
                if step >= READING_FROM:
                    last = len(ids) + len(asking) - 1
                    seen = [*range(len(front)), *range(len(ids), last + 1)]
                    looks[READING].append(Look(len(rows), last, seen, [word]))
            ids += asking + reply
            segments += [-number if blind else number] * length
            positions += range(start, start + length)
            weight = WEIGHTS.get(question.kind, 1.0) if step >= WEIGHTED_FROM else 1.0
            learn += [0.0] * len(asking) + [weight / len(reply)] * len(reply)
        rows.append((ids, segments, positions, learn))
    ids = padded([row[0] for row in rows], tokenizer.pad_token_id)
    segments = padded([row[1] for row in rows], QUESTIONS + 1)
    length = ids.shape[1]
    later = padded([row[2] for row in rows], 0)[:, : length - len(front)]
    here, there = segments[:, :, None], segments[:, None, :]
    seen = (here == there) | (there == 0) & ((here >= 0) | (torch.arange(length) < role))
    return Batch(
        ids=ids,
        positions=torch.cat([front_positions[:, None].expand(3, pictures, -1), later.expand(3, -1, -1)], dim=-1),
        mask=(seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None],
        learn=padded([row[3] for row in rows], 0.0),
        pixels=processor([picture(scene) for scene in scenes], return_tensors="pt"),
        looks=looks,
    )


def shape_sought(question: Question) -> str | None:
    """The shape by which a question finds the thing that it asks about."""
    words = re.findall(r"\w+", question.text)
    return next((shape for shape in SHAPES if shape in words), None) if question.kind in ("colour", "place") else None


def positions_of_front(length: int, role: int) -> list[list[int]]:
    """Rows for time, height and width, as `get_rope_index` gives them (a test holds them against it)."""
    side, text = SIDE // PATCH // MERGE, list(range(role + 1))
    start, last = role + 1, role + 1 + side
    rows = [i // side for i in range(IMAGE_TOKENS)]
    columns = [i % side for i in range(IMAGE_TOKENS)]
    return [text + [start + at for at in image] + [last] for image in ([0] * IMAGE_TOKENS, rows, columns)]


def padded(rows: list[list], value) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def blind_prompt(rng: random.Random) -> str:
    """A prompt without a picture: a question, or words."""
    if rng.random() < 0.7:
        return rng.choice(questions(draw_scene(rng), rng)).text
    words = rng.choices([*OTHER_WORDS, *COLOURS, "zzz"], k=rng.randint(1, 6))
    return " ".join(words) + rng.choice(("", ".", "?", "!"))


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


def contents(scene) -> torch.Tensor:
    """Shape and colour of the thing in each image token's cell, counted from 1, 0 where it is empty: `[tokens, 2]`."""
    side = SIDE // PATCH // MERGE
    found = torch.zeros(side, side, 2, dtype=torch.long)
    for thing in scene.things:
        rows, columns = (slice(at * side // GRID, (at + 1) * side // GRID) for at in (thing.row, thing.column))
        found[rows, columns] = torch.tensor([1 + SHAPES.index(thing.shape), 1 + list(COLOURS).index(thing.colour)])
    return found.flatten(0, 1)


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
