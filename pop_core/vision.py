"""Eyes: from pictures to image tokens in a prompt, and from those to what the decoder is given.

`Eyes.prepare` brings pictures to the model's own input and says how many tokens each takes; `encode_prompt` puts that
many placeholders into the prompt; `Eyes.look` runs the model's own vision tower. Nothing of a run is left on the model:
positions are computed here, since the stock forward keeps them (`rope_deltas`) from one prompt to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from .errors import BrokenModel, PopError, first_line
from .families import FAMILIES, SEEING
from .pictures import MOST_PICTURES, Picture, open_picture, thumbnail
from .plan import whole_number
from .sight import Place, Sight
from .stopping import Checkpoint, carry_on
from .timing import milliseconds
from .units import count

MOST_TOKENS = 1280  # of one picture, where nobody asks for more: larger ones are scaled down, and that is said
HIGHEST_MOST = 16_384
WHO_SEES = f"use shapes-vl, or a {', '.join(FAMILIES[name] for name in SEEING[:-1])} or Gemma 3 model"


@dataclass(frozen=True, eq=False)
class Pixels:
    """Pictures as the vision tower takes them. tensors: its arguments. facts: of each picture, for people:
    `{width, height, seen_width, seen_height, tokens, rows, columns, thumbnail}`, sizes in pixels before and after
    scaling, tokens as a grid."""

    tensors: dict
    facts: tuple[dict, ...]
    notices: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(fact["tokens"] for fact in self.facts)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Grid:
    """How a picture is seen: its tokens, the pixels that it is scaled to, and the limit on tokens that made it smaller
    than the model's own processor would have it, or 0."""

    rows: int
    columns: int
    width: int
    height: int
    limit: int = 0


class Eyes(ABC):
    """What a loaded model of one family sees with; holds nothing of a run.

    placeholder: the text that stands for a picture in the family's chat template.
    """

    def __init__(self, loaded):
        self.model, self.processor, self.device = loaded.model, loaded.image_processor, loaded.device
        self.config, self.token_text = loaded.model.config, loaded.tokenizer.convert_ids_to_tokens
        self.placeholder, self.room = self._placeholder(), loaded.spec.max_positions

    def prepare(self, images: Sequence, most_tokens: int | None = None) -> Pixels:
        """Anything that `open_picture` takes, in the order of the prompt. Raises `PopError`.

        most_tokens: that each picture is scaled to, as nearly as its shape allows and never more; None for what the
        model's own processor takes, up to `MOST_TOKENS`.
        """
        if len(images) > MOST_PICTURES:
            raise PopError(f"There are {len(images):,} pictures; a prompt takes at most {MOST_PICTURES}.")
        most, total, facts, notices, made = checked_most(most_tokens), 0, [], [], []
        for number, image in enumerate(images, start=1):  # one at a time: many large ones would fill the memory
            picture = open_picture(image)
            grid = self._grid(picture.image, most)
            tokens = grid.rows * grid.columns
            total += tokens
            if total >= self.room:  # before its pixels are scaled: what does not fit may be large
                whole = "The pictures take" if number == len(images) else f"{number} of {len(images)} pictures take"
                raise PopError(f"{whole} {total:,} tokens; with the text, {self.room:,} fit this model's context.")
            notices += picture.notices
            fact = {"width": picture.width, "height": picture.height}
            fact |= {"seen_width": grid.width, "seen_height": grid.height}
            fact |= {"tokens": tokens, "rows": grid.rows, "columns": grid.columns}
            facts.append(fact | {"thumbnail": thumbnail(picture.image)})
            if grid.limit:
                notices.append(
                    f"A picture of {picture.width:,} x {picture.height:,} pixels was scaled to {grid.width:,} x "
                    f"{grid.height:,}, so that it takes {count(tokens, 'token')}: at most {grid.limit:,} are allowed."
                )
            made.append(self._tensors(picture, grid))
        tensors = {name: torch.cat([one[name] for one in made]) for name in made[0]} if made else {}
        return Pixels(tensors, tuple(facts), tuple(dict.fromkeys(notices)))

    @abstractmethod
    def in_full(self, tokens: int) -> str:
        """What takes the placeholder's place in the text, for a picture of so many tokens."""

    def alone(self) -> str:
        """The placeholder with what the template puts around it, for a prompt without a template."""
        return self.placeholder

    @abstractmethod
    def sizes(self) -> list[tuple[str, int, int]]:
        """(name, the image processor's, the model's) of what both have to agree on."""

    @abstractmethod
    def _placeholder(self) -> str:
        """The text of the token that stands for a picture in the template."""

    def look(self, ids: torch.Tensor, pixels: Pixels, checkpoint: Checkpoint = carry_on) -> Sight:
        """Run the vision tower. ids: `[1, N]`, the prompt with its image tokens. checkpoint: called before each layer
        of the tower; may raise to abandon it. Raises `PopError` where the number of image tokens in the prompt is not
        that of the pictures."""
        found = []
        with torch.inference_mode(False), torch.no_grad():  # a backward pass may follow
            places = self._places(ids[0], pixels)
            tensors = {name: value.to(self.device) for name, value in pixels.tensors.items()}
            with _watched(self._tower, checkpoint):
                ms = milliseconds(lambda: found.append(self._seen(tensors)), self.device)
            features, deepstack = found[0]
            return Sight(places, features, deepstack, self._positions(ids, tensors), ms)

    @abstractmethod
    def stock_arguments(self, ids: torch.Tensor, pixels: Pixels) -> dict:
        """What the stock forward wants beside ids `[1, N]`, with its tower's output: to time all the rest."""

    def forget(self) -> None:
        """Take away what a stock forward left on the model."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None

    @property
    @abstractmethod
    def _tower(self) -> torch.nn.Module:
        """The module that looks at pictures."""

    def _places(self, ids: torch.Tensor, pixels: Pixels) -> tuple[Place, ...]:
        slots = (ids == self.config.image_token_id).nonzero().flatten().tolist()
        if len(slots) != pixels.tokens:
            raise PopError(f"The prompt has {len(slots):,} image tokens, but its pictures take {pixels.tokens:,}.")
        places, at = [], 0
        for fact in pixels.facts:
            places.append(Place(slots[at], fact["rows"], fact["columns"]))
            at += fact["tokens"]
        return tuple(places)

    @abstractmethod
    def _grid(self, image, most: int | None) -> Grid:
        """How a picture is seen, known from its size alone."""

    @abstractmethod
    def _tensors(self, picture: Picture, grid: Grid) -> dict:
        """The tower's arguments for one picture; those of several follow each other in their first dimension."""

    @abstractmethod
    def _seen(self, tensors: dict) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Features `[n, hidden]` of all image tokens, and those of DeepStack by level."""

    def _positions(self, ids: torch.Tensor, tensors: dict) -> torch.Tensor | None:
        return None


class QwenEyes(Eyes):
    """Qwen2.5-VL and Qwen3-VL: a picture takes as many tokens as its size asks for, and has positions in two
    dimensions (M-RoPE)."""

    @property
    def _tower(self):
        return self.model.model.visual

    def in_full(self, tokens):
        return self.placeholder * tokens

    def alone(self):
        config = self.config
        before, after = (self.token_text(i) for i in (config.vision_start_token_id, config.vision_end_token_id))
        return before + self.placeholder + after

    def sizes(self):
        own, model = self.processor, self.config.vision_config
        return [
            ("patch size", own.patch_size, model.patch_size),
            ("merge size", own.merge_size, model.spatial_merge_size),
            ("temporal patch size", own.temporal_patch_size, model.temporal_patch_size),
        ]

    def _placeholder(self):
        return self.token_text(self.config.image_token_id)

    def _grid(self, image, most):
        own, side = self.processor.size, self.processor.patch_size * self.processor.merge_size
        bounds = own["shortest_edge"], own["longest_edge"]
        height, width = smart_resize(image.height, image.width, side, *bounds)
        rows, columns, limit = height // side, width // side, most or MOST_TOKENS
        if not most and rows * columns <= limit:
            return Grid(rows, columns, width, height)
        # the most tokens within the limit that keep the picture's shape, but for rounding
        scale = (limit / (image.height * image.width)) ** 0.5
        down, across = (max(1, int(length * scale)) for length in (image.height, image.width))
        down = max(1, min(down, limit // across))
        across = min(across, limit // down)
        return Grid(down, across, across * side, down * side, limit if down * across < rows * columns else 0)

    def _tensors(self, picture, grid):
        image = picture.image.resize((grid.width, grid.height), self.processor.resample)
        made = self.processor([image], do_resize=False, return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}

    def stock_arguments(self, ids, pixels):
        tensors = {name: value.to(self.device) for name, value in pixels.tensors.items()}
        seen = self.model.model.get_image_features(**tensors, return_dict=True)
        kinds = (ids == self.config.image_token_id).int()
        return {
            "mm_encoder_outputs": {"image": seen},
            "image_grid_thw": tensors["image_grid_thw"],
            "mm_token_type_ids": kinds,
        }

    def _seen(self, tensors):
        output = self.model.model.get_image_features(**tensors, return_dict=True)
        deepstack = getattr(output, "deepstack_features", None) or ()
        return torch.cat(output.pooler_output), tuple(torch.cat(level) for level in deepstack)

    def _positions(self, ids, tensors):
        kinds = (ids == self.config.image_token_id).int()
        grid = tensors["image_grid_thw"]
        return self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][:, 0]


class GemmaEyes(Eyes):
    """Gemma 3: every picture is scaled to one square and takes the same number of tokens, in ordinary positions."""

    @property
    def _tower(self):
        return self.model.model.vision_tower

    def in_full(self, tokens):
        image, end = (self.token_text(i) for i in (self.config.image_token_id, self.config.eoi_token_id))
        return f"\n\n{self.placeholder}{image * tokens}{end}\n\n"

    def sizes(self):
        own, side = self.processor.size, self.config.vision_config.image_size
        return [("height", own["height"], side), ("width", own["width"], side)]

    def _placeholder(self):
        return self.token_text(self.config.boi_token_id)

    def _grid(self, image, most):
        tokens, size = self.config.mm_tokens_per_image, self.processor.size
        if most and most != tokens:
            raise PopError(f"This model takes {tokens} tokens for every picture; {most:,} cannot be had.")
        side = round(tokens**0.5)
        return Grid(side, side, size["width"], size["height"])

    def _tensors(self, picture, grid):
        made = self.processor([picture.image], do_pan_and_scan=False, return_tensors="pt")
        return {"pixel_values": made["pixel_values"]}

    def stock_arguments(self, ids, pixels):
        seen = self.model.model.get_image_features(pixels.tensors["pixel_values"].to(self.device), return_dict=True)
        return {"mm_encoder_outputs": {"image": seen}, "token_type_ids": (ids == self.config.image_token_id).int()}

    def _seen(self, tensors):
        return self.model.model.get_image_features(**tensors, return_dict=True).pooler_output.flatten(0, 1), ()


def check_eyes(loaded) -> None:
    """Prepare a white picture, so that an image processor or a tokenizer that is not the model's is found out when the
    model is loaded. Raises `BrokenModel`."""
    blame = f"The image processor and the tokenizer of {loaded.name} do not fit its eyes"
    try:
        eyes = eyes_of(loaded)
        wrong = [f"{name} {own}, not {wanted}" for name, own, wanted in eyes.sizes() if own != wanted]
        eyes.in_full(1), eyes.alone()
        pixels = eyes.prepare([Image.new("RGB", (64, 64), "white")])
    except Exception as error:  # whatever the processor raises about values that cannot be
        raise BrokenModel(f"{blame} ({first_line(error)}).") from error
    if wrong:
        raise BrokenModel(f"{blame}: {', '.join(wrong)}.")
    if not all(value.isfinite().all() for value in pixels.tensors.values()):
        raise BrokenModel(f"{blame}: a white picture is not finite.")


def eyes_of(loaded) -> Eyes:
    """The eyes of a loaded model. Raises `PopError` for one that has none."""
    if not loaded.spec.sees:
        raise PopError(f"{loaded.name} reads text only and cannot see a picture; {WHO_SEES}.")
    return GemmaEyes(loaded) if loaded.spec.family == "gemma3" else QwenEyes(loaded)


@contextmanager
def _watched(tower: torch.nn.Module, checkpoint: Checkpoint):
    """Call `checkpoint` before each of a tower's layers; nothing stays on it."""
    layers = max((part for part in tower.modules() if isinstance(part, torch.nn.ModuleList)), key=len)

    def see(*_) -> None:  # what a hook returns would become the layer's input
        checkpoint()

    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def checked_most(value) -> int | None:
    """A number of tokens, or None. Raises `PopError`."""
    if value is None:
        return None
    most = whole_number(value, "number of image tokens")
    if not 4 <= most <= HIGHEST_MOST:
        raise PopError(f"The number of image tokens is {most:,}; it must be 4 to {HIGHEST_MOST:,}.")
    return most
