"""Train the bundled mixture-of-experts model from nothing, or measure the one that is there.

    python scripts/train_moe.py                  train, save to assets/models/stories-moe, measure
    python scripts/train_moe.py --resume         the same run, from its last checkpoint in the cache; with a larger
                                                 --steps, that run made longer
    python scripts/train_moe.py --evaluate       the numbers of the model card

The text of step n depends on the seed and n alone, so a run that was interrupted sees what it would have seen.
Practice in copying comes first, then short documents, then long ones: what is learned on the short ones carries over,
and they hold more questions a token.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from moe_text import KINDS, document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from training import save_checkpoint, state_to_resume
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pop_core.embedded import cache_dir

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "models" / "stories-moe"
SEED, HELD_OUT_SEED = 2026, 1129
END, VOCABULARY, TOKENIZER_DOCUMENTS = "<|end|>", 2048, 4000
ROPE_BASE = 1e5  # its last pairs hardly turn within a prompt, so that matches are found at any distance

STEPS, WARM_UP = 2500, 50
STAGES = (  # until this share of the steps: tokens a row, rows a batch, the kind of text ("" for all)
    (0.03, 96, 10, "copies"),
    (0.55, 192, 5, ""),
    (0.85, 256, 4, ""),
    (1.0, 512, 2, ""),
)
PEAK_RATE, WEIGHT_DECAY, CLIP = 2e-3, 0.05, 1.0
ANSWER_WEIGHT = 10.0  # in the loss: an answer can be known, while most of a document is drawn by lot
BALANCE = 0.01  # of the loss that keeps all experts in use
CHECKPOINT_EVERY, REPORT_EVERY = 250, 50
HELD_OUT_DOCUMENTS = 60  # of each kind
ASKED = tuple(kind for kind in KINDS if kind != "copies")  # those are practice: where a row of words ends is not said


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text can be encoded. Digits stay single: sums are learned digit by digit."""
    words = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(f"{SEED} tokenizer")
    tokenizer.train_from_iterator(
        (document(rng).text for _ in range(TOKENIZER_DOCUMENTS)),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def new_model(tokenizer) -> Qwen3MoeForCausalLM:
    """Eight layers of eight experts, two of them a token, with a head start."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=320,  # of dense layers, which this model has not
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=160,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        router_aux_loss_coef=BALANCE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    give_head_start(model)
    return model


@torch.no_grad()
def give_head_start(model, embedding_std=0.05, strength=0.1, copying_layers=range(1, 4)) -> None:
    """Begin with heads that find what followed the same word before, which take long to form by themselves.

    A plain initialisation, on text with fewer questions, was still on a plateau after 950 steps: the form of every
    answer was right, its content guessed. All that is set here goes on to be trained. The recipe is ours, after
    "mimetic initialization" (Trockman and Kolter, 2023). In the first layer, two heads look at the previous token, and
    note in a part of the residual stream that embeddings leave free (`note`) what they read there (`read`); two more
    look two and three tokens back. In the next layers, two heads look for a note that equals the present token, and
    copy the token that bears it. How far back to look is told by the fast pairs of the rotary embedding, what to match
    by the slow ones.
    """
    config, layers = model.config, model.model.layers
    hidden, size = config.hidden_size, config.head_dim
    directions = torch.linalg.qr(torch.randn(hidden, hidden))[0].T
    constant, read, note = directions[0], directions[1 : 1 + size], directions[1 + size : 1 + 2 * size]
    turns = ROPE_BASE ** (-torch.arange(size // 2) / (size // 2))  # radians a token, of each rotary pair
    fast = (torch.arange(size // 2) < 6).float()

    embeddings = model.get_input_embeddings().weight
    embeddings.normal_(std=embedding_std)
    embeddings -= embeddings @ note.T @ note + (embeddings @ constant)[:, None] * constant
    embeddings += 8 * embedding_std * constant  # so that a query or key can be the same for all tokens

    first = layers[0].self_attn
    for head, back in enumerate((1, 1, 2, 3)):
        query = torch.cat([fast * torch.cos(turns * back), -fast * torch.sin(turns * back)])
        noise = 0.01 * torch.randn(size, hidden)
        first.q_proj.weight[head * size :][:size] = query[:, None] * constant + noise
    key = torch.cat([fast, 0 * fast])
    for group in range(config.num_key_value_heads):
        noise = 0.01 * torch.randn(size, hidden)
        first.k_proj.weight[group * size :][:size] = key[:, None] * constant + noise
    first.v_proj.weight[:size] = read
    first.o_proj.weight[:, :size] = strength * note.T
    first.q_norm.weight.fill_(3.0)  # sharp: the neighbours of the wanted token turn only a little less
    first.k_norm.weight.fill_(3.0)

    slow = torch.cat([1 - fast, 1 - fast])[:, None]
    for index in copying_layers:
        attention = layers[index].self_attn
        copied = torch.linalg.qr(torch.randn(hidden, size))[0].T
        copied -= copied @ note.T @ note + (copied @ constant)[:, None] * constant
        for head in range(2):  # the two of the first key-value head
            attention.q_proj.weight[head * size :][:size] = slow * read + 0.02 * head * torch.randn(size, hidden)
            attention.o_proj.weight[:, head * size :][:, :size] = strength * copied.T
        attention.k_proj.weight[:size] = slow * note
        attention.v_proj.weight[:size] = copied
    for layer in layers[1:]:
        layer.self_attn.q_norm.weight.fill_(2.0)
        layer.self_attn.k_norm.weight.fill_(2.0)


def sorted_experts(experts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the stock loop over experts computes, with one gradient for all experts where that makes one for each.

    hidden: (tokens, width); index and weights: (tokens, experts per token).
    """
    order = index.flatten().argsort()
    tokens = order // index.shape[1]
    counts = torch.bincount(index.flatten(), minlength=experts.num_experts).tolist()
    outputs = []
    for part, into, out_of in zip(
        hidden[tokens].split(counts), experts.gate_up_proj.unbind(), experts.down_proj.unbind(), strict=True
    ):
        gate, up = F.linear(part, into).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, out_of))
    weighted = torch.cat(outputs) * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted)


ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)


def encode(tokenizer, written) -> tuple[list[int], list[bool]]:
    """The ids of a document with its end token, and which of them are part of an answer."""
    encoded = tokenizer(written.text, return_offsets_mapping=True)
    in_answer = [any(a <= start and end <= b for a, b in written.answers) for start, end in encoded.offset_mapping]
    return [*encoded.input_ids, tokenizer.eos_token_id], [*in_answer, False]


def batch(tokenizer, step: int, length: int, rows: int, kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and loss weights, both (rows, length). A row starts with a document, as a prompt does; the last is cut."""
    rng = random.Random(f"{SEED} {step}")
    ids, weights = [], []
    for _ in range(rows):
        row, weight = [], []
        while len(row) < length:
            tokens, in_answer = encode(tokenizer, document(rng, kind=kind))
            if len(tokens) <= length:  # the questions of a longer one would be cut off
                row += tokens
                weight += [ANSWER_WEIGHT if inside else 1.0 for inside in in_answer]
        ids.append(row[:length])
        weights.append(weight[:length])
    return torch.tensor(ids), torch.tensor(weights)


def losses(model, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted loss per token, load-balancing loss)."""
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    per_token = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (per_token * weights).sum() / weights.sum(), output.aux_loss


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    return PEAK_RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(steps: int | None, resume: bool) -> None:
    """Train and save. `steps`: None for `STEPS`, or for those of the run that is resumed."""
    tokenizer = train_tokenizer()
    model = new_model(tokenizer).train()
    model.set_experts_implementation("sorted")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    checkpoint = cache_dir() / "training" / "stories-moe.pt"
    first, seconds = 0, 0.0
    if not (state := state_to_resume(checkpoint, resume)):
        steps = steps or STEPS
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds, steps = state["step"], state["seconds"], steps or state["steps"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens in the vocabulary")

    tokens = 0
    begun = time.perf_counter() - seconds
    for step in range(first, steps):
        length, rows, kind = next(stage for until, *stage in STAGES if step < until * steps)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss, balance = losses(model, *batch(tokenizer, step, length, rows, kind))
        (loss + BALANCE * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        tokens += length * rows
        seconds = time.perf_counter() - begun
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
            print(
                f"step {step + 1}/{steps}  loss {loss:.3f}  balance {balance:.3f}  gradient {norm:.2f}  "
                f"{tokens:,} tokens in this run, {seconds:.0f} s in all",
                flush=True,
            )
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step + 1, steps=steps)
            save_checkpoint(checkpoint, state | {"seconds": seconds})
    save(model, tokenizer)


def save(model, tokenizer) -> None:
    """The folder that `from_pretrained` reads, in bfloat16."""
    model.set_experts_implementation("eager")
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


@torch.inference_mode()
def evaluate() -> None:
    """Print the numbers of the model card, of the saved model in float32, on documents that training never saw."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    print_sizes(model)
    unigram = unigram_losses(tokenizer)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Ċ")}
    rng = random.Random(HELD_OUT_SEED)
    loads = {kind: torch.zeros(layers, experts) for kind in ASKED}
    total, baseline, count, right, asked = 0.0, 0.0, 0, Counter(), Counter()
    for kind in ASKED:
        for _ in range(HELD_OUT_DOCUMENTS):
            written = document(rng, held_out=True, kind=kind)
            ids, _ = encode(tokenizer, written)
            targets = torch.tensor(ids[1:])
            output = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
            logits = output.logits[0, :-1]
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            baseline += unigram[targets].sum().item()
            count += len(targets)
            asked[kind] += len(written.answers)
            right[kind] += sum(exact_answers(tokenizer, written, ids, logits.argmax(-1).tolist(), ends))
            for layer, scores in enumerate(output.router_logits):
                chosen = scores.topk(model.config.num_experts_per_tok).indices.flatten()
                loads[kind][layer] += torch.bincount(chosen, minlength=experts)
    print(f"\nHeld-out loss per token: {total / count:.3f} nats; unigram baseline {baseline / count:.3f}")
    print(f"\nExact greedy answers on held-out questions: {sum(right.values())} of {sum(asked.values())}", end="")
    print(f" ({sum(right.values()) / sum(asked.values()):.1%})")
    for kind in ASKED:
        print(f"  {kind:10} {right[kind]:4} of {asked[kind]:4}  {right[kind] / asked[kind]:6.1%}")
    print_loads(loads)


def exact_answers(tokenizer, written, ids, predicted, ends):
    """For each answer, whether greedy decoding from the true text before it writes exactly it and then stops the line.

    Decoding greedily gives an answer if and only if each of its tokens is the most likely one after those before it,
    so one pass over the document tells it for all answers; `predicted[i]` is the guess of token `i + 1`.
    """
    offsets = tokenizer(written.text, return_offsets_mapping=True).offset_mapping
    for start, end in written.answers:
        places = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= end]
        yield all(predicted[i - 1] == ids[i] for i in places) and predicted[places[-1]] in ends


def unigram_losses(tokenizer) -> torch.Tensor:
    """Minus the log frequency of each token in training text, every token counted once more than it is there."""
    rng = random.Random(f"{SEED} unigram")
    counts = torch.ones(len(tokenizer))
    for _ in range(TOKENIZER_DOCUMENTS):
        counts += torch.bincount(torch.tensor(encode(tokenizer, document(rng))[0]), minlength=len(tokenizer))
    return -(counts / counts.sum()).log()


def print_sizes(model) -> None:
    """Parameters in all, and those that one token passes through."""
    everything = sum(p.numel() for p in model.parameters())
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = everything - in_experts + in_experts * model.config.num_experts_per_tok // model.config.num_experts
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{everything:,} parameters, {active:,} of them active per token; the folder has {size / 1e6:.1f} MB")


def print_loads(loads: dict[str, torch.Tensor]) -> None:
    """What share of the tokens each expert takes, and how much that depends on the kind of text."""
    shares = {kind: load / load.sum(-1, keepdim=True) for kind, load in loads.items()}
    overall = torch.stack(list(shares.values())).mean(0)
    print(
        "\nShare of each expert, per layer, all kinds of text weighing the same (even would be "
        f"{1 / overall.shape[1]:.3f}):"
    )
    for layer, row in enumerate(overall.tolist()):
        print(f"  layer {layer}  " + "  ".join(f"{share:.3f}" for share in row))
    print("\nShare of the choices that would have to move for a kind to use the experts as all kinds together do:")
    for layer in range(len(overall)):
        moved = {kind: (share[layer] - overall[layer]).abs().sum().item() / 2 for kind, share in shares.items()}
        print(f"  layer {layer}  " + "  ".join(f"{kind} {value:.2f}" for kind, value in moved.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"{STEPS} by default; a resumed run keeps its own, unless told")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="measure the saved model and do not train")
    parser.add_argument("--threads", type=int, default=2, help="of torch; one where other work keeps the cores busy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.evaluate:
        train(options.steps, options.resume)
    evaluate()


if __name__ == "__main__":
    main()
