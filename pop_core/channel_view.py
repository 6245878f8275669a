"""What a study says about its channels, read back from plain data: which candidates each token kept, who stands where.

Everything here takes `Study.to_dict()` (or a recorded one), or one of its layers, and imports no torch.
"""

from .plan import ALL, CANDIDATES, NONE

OURS, DENSE = "plan", "dense"  # names in the table of methods
PAPER = "Partition-guided Online Pruning, arXiv 2602.06822"
METHODS = {  # name -> (full name, what it does, where it comes from)
    DENSE: ("The dense model", "Every channel adds to every token: what the others are held against.", ""),
    CANDIDATES: (
        "Partition-guided online pruning",
        "The prompt splits the channels into retained, candidate and pruned ones; every token chooses half of the "
        "candidates anew.",
        PAPER,
    ),
    NONE: (
        "Fixed mask from the prompt",
        "The same scores, but no candidates: the best channels for the prompt serve every token.",
        f"the ablation of {PAPER}",
    ),
    ALL: (
        "All channels scored again",
        "Every token chooses among all channels: nothing is read less, so this is the best that choosing can do, not "
        "a way to save time.",
        f"the ablation of {PAPER}",
    ),
    "griffin": (
        "GRIFFIN",
        "A fixed mask from the prompt, by each channel's share in the activations of the prompt's tokens.",
        "arXiv 2404.01365",
    ),
    "wanda-sp": (
        "Wanda, structured",
        "A fixed mask from calibration text, the same for every prompt, also while reading: activation norm times "
        "weight.",
        "arXiv 2306.11695, as arXiv 2312.11983 defines it",
    ),
    "flap": (
        "FLAP, fluctuation-based adaptive structured pruning",
        "Channels that vary least over calibration text go, over the whole model at once, and a bias makes up for "
        "their mean; also while reading.",
        "arXiv 2312.11983",
    ),
    "shortgpt": (
        "ShortGPT",
        "Whole layers that change their input least go, reading and writing, until as many weights are gone.",
        "arXiv 2403.03853",
    ),
}


def layers(result: dict) -> list[dict]:
    """What the pruned run did, layer by layer."""
    return (result["pruned"]["channels"] or {}).get("layers", [])


def is_mixture(layer: dict) -> bool:
    return "tokens" in layer


def single(result: dict) -> list[int]:
    """The layers that have one FFN."""
    return [at for at, layer in enumerate(layers(result)) if not is_mixture(layer)]


def mixtures(result: dict) -> list[int]:
    """The layers that are mixtures of experts."""
    return [at for at, layer in enumerate(layers(result)) if is_mixture(layer)]


def pruning(result: dict) -> dict:
    """The plan's channel pruning."""
    return result["plan"]["channels"]


def channels(layer: dict) -> int:
    """Of all FFNs of a layer."""
    return layer["retained"] + layer["candidates"] + layer["pruned"]


def left_out(layer: dict) -> float:
    """The share of a layer's channels that added nothing to a token, as it happened."""
    return 1 - (layer["retained"] + layer["chosen"]) / channels(layer)


def chance(layer: dict) -> float | None:
    """The overlap of two choices that have nothing to do with each other; None without a choice."""
    candidates, chosen = layer["candidates"], layer["chosen"]
    return chosen / candidates if 0 < chosen < candidates else None


def kept_bits(layer: dict) -> list[list[int]]:
    """For each token that was read while writing, a 0 or 1 for each candidate, in the order of their index."""
    return [[int(bit) for bit in f"{int(text, 16):0{layer['candidates']}b}"] for text in layer.get("kept", [])]


def ranked(bits: list[list[int]]) -> list[int]:
    """The candidates from the one that was kept most often to the least; equals by index."""
    counts = [sum(column) for column in zip(*bits, strict=True)]
    return sorted(range(len(counts)), key=lambda at: (-counts[at], at))


def step_overlaps(layer: dict) -> list[float | None]:
    """For each token, the share of what it kept that the token before had kept; None for the first."""
    numbers = [int(text, 16) for text in layer.get("kept", [])]
    if not numbers or chance(layer) is None:
        return [None] * len(numbers)
    pairs = zip(numbers[1:], numbers, strict=False)
    return [None] + [(now & before).bit_count() / layer["chosen"] for now, before in pairs]


def row(result: dict, name: str) -> dict | None:
    """A method of the table."""
    return next((entry for entry in result["methods"] if entry["name"] == name), None)


def described(entry: dict, result: dict) -> tuple[str, str, str]:
    """(full name, what it does, source or "") of a method of the table."""
    name = pruning(result)["rescore"] if entry["name"] == OURS else entry["name"]
    return METHODS.get(name, (entry["title"], "Not described.", ""))
