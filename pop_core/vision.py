"""Eyes: from pictures to image tokens in a prompt, and from those to what the decoder is given.

`Eyes.prepare` brings pictures to the model's own input and says how many tokens each takes; `encode_prompt` puts that
many placeholders into the prompt; `Eyes.look` runs the model's own vision tower. Nothing of a run is left on the model:
positions are computed here, since the stock forward keeps them (`rope_deltas`) from one prompt to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from .errors import PopError
from .families import FAMILIES, SEEING
from .pictures import MOST_PICTURES, Picture, open_picture, thumbnail
from .plan import whole_number
from .sight import Place, Sight
from .timing import milliseconds

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


class Eyes:
    """What a loaded model of one family sees with; holds nothing of a run.

    placeholder: the text that stands for a picture in the family's chat template.
    """

    def __init__(self, loaded):
        self.model, self.processor, self.device = loaded.model, loaded.image_processor, loaded.device
        self.config, self.token_text = loaded.model.config, loaded.tokenizer.convert_ids_to_tokens
        self.placeholder = self._placeholder()

    def prepare(self, images: Sequence, most_tokens: int | None = None) -> Pixels:
        """Anything that `open_picture` takes, in the order of the prompt. most_tokens: that each picture is scaled to;
        None for what the model's own processor takes, up to `MOST_TOKENS`. Raises `PopError`."""
        if len(images) > MOST_PICTURES:
            raise PopError(f"There are {len(images):,} pictures; a prompt takes at most {MOST_PICTURES}.")
        pictures = [open_picture(image) for image in images]
        tensors, seen = self._processed(pictures, checked_most(most_tokens))
        facts, notices = [], []
        for picture, (rows, columns, width, height, limited) in zip(pictures, seen, strict=True):
            notices += picture.notices
            fact = {"width": picture.width, "height": picture.height, "seen_width": width, "seen_height": height}
            fact |= {"tokens": rows * columns, "rows": rows, "columns": columns}
            facts.append(fact | {"thumbnail": thumbnail(picture.image)})
            if limited:
                notices.append(
                    f"A picture of {picture.width:,} x {picture.height:,} pixels was scaled to {width:,} x {height:,}, "
                    f"so that it takes {rows * columns:,} tokens: at most {limited:,} are allowed."
                )
        return Pixels(tensors, tuple(facts), tuple(dict.fromkeys(notices)))

    def in_full(self, tokens: int) -> str:
        """What takes the placeholder's place in the text, for a picture of so many tokens."""
        raise NotImplementedError

    def alone(self) -> str:
        """The placeholder with what the template puts around it, for a prompt without a template."""
        return self.placeholder

    def _placeholder(self) -> str:
        raise NotImplementedError

    def look(self, ids: torch.Tensor, pixels: Pixels) -> Sight:
        """Run the vision tower. ids: `[1, N]`, the prompt with its image tokens. Raises `PopError` where the number of
        image tokens in the prompt is not that of the pictures."""
        found = []
        with torch.inference_mode(False), torch.no_grad():  # a backward pass may follow
            places = self._places(ids[0], pixels)
            tensors = {name: value.to(self.device) for name, value in pixels.tensors.items()}
            ms = milliseconds(lambda: found.append(self._seen(tensors)), self.device)
            features, deepstack = found[0]
            return Sight(places, features, deepstack, self._positions(ids, tensors), ms)

    def stock_arguments(self, ids: torch.Tensor, pixels: Pixels) -> dict:
        """What the stock forward wants beside ids `[1, N]`, with its tower's output: to time all the rest."""
        raise NotImplementedError

    def forget(self) -> None:
        """Take away what a stock forward left on the model."""

    def _places(self, ids: torch.Tensor, pixels: Pixels) -> tuple[Place, ...]:
        slots = (ids == self.config.image_token_id).nonzero().flatten().tolist()
        if len(slots) != pixels.tokens:
            raise PopError(f"The prompt has {len(slots):,} image tokens, but its pictures take {pixels.tokens:,}.")
        places, at = [], 0
        for fact in pixels.facts:
            places.append(Place(slots[at], fact["rows"], fact["columns"]))
            at += fact["tokens"]
        return tuple(places)

    def _processed(self, pictures: list[Picture], most: int | None) -> tuple[dict, list[tuple]]:
        """The tower's arguments, and of each picture (rows, columns, width, height, the limit that scaled it or 0)."""
        raise NotImplementedError

    def _seen(self, tensors: dict) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Features `[n, hidden]` of all image tokens, and those of DeepStack by level."""
        raise NotImplementedError

    def _positions(self, ids: torch.Tensor, tensors: dict) -> torch.Tensor | None:
        return None


class QwenEyes(Eyes):
    """Qwen2.5-VL and Qwen3-VL: a picture takes as many tokens as its size asks for, and has positions in two
    dimensions (M-RoPE)."""

    def in_full(self, tokens):
        return self.placeholder * tokens

    def alone(self):
        config = self.config
        before, after = (self.token_text(i) for i in (config.vision_start_token_id, config.vision_end_token_id))
        return before + self.placeholder + after

    def _placeholder(self):
        return self.token_text(self.config.image_token_id)

    def _processed(self, pictures, most):
        made, seen = [], []
        merge, patch = self.processor.merge_size, self.processor.patch_size
        for picture in pictures:
            size, limit = self._size(picture.image, most)
            made.append(self.processor([picture.image], size=size, return_tensors="pt"))
            _, rows, columns = made[-1]["image_grid_thw"][0].tolist()
            seen.append((rows // merge, columns // merge, columns * patch, rows * patch, limit))
        return {name: torch.cat([one[name] for one in made]) for name in ("pixel_values", "image_grid_thw")}, seen

    def _size(self, image, most: int | None) -> tuple[dict, int]:
        """The bounds that a picture is scaled to, in pixels, and the limit on tokens that makes it smaller, or 0."""
        own, side = self.processor.size, self.processor.patch_size * self.processor.merge_size
        least, largest, limit = own["shortest_edge"], own["longest_edge"], most or MOST_TOKENS
        if not most and largest <= limit * side * side:
            return {"shortest_edge": least, "longest_edge": largest}, 0
        bound = limit * side * side
        limited = bound < min(image.width * image.height, largest)
        while True:  # the processor rounds up where it enlarges, and of a strip it keeps a whole row of tokens
            least = bound if most else min(least, bound)
            height, width = smart_resize(image.height, image.width, side, least, bound)
            if height * width <= limit * side * side:
                return {"shortest_edge": least, "longest_edge": bound}, limit if limited else 0
            bound = int(0.95 * bound)

    def stock_arguments(self, ids, pixels):
        tensors = {name: value.to(self.device) for name, value in pixels.tensors.items()}
        seen = self.model.model.get_image_features(**tensors, return_dict=True)
        kinds = (ids == self.config.image_token_id).int()
        return {
            "mm_encoder_outputs": {"image": seen},
            "image_grid_thw": tensors["image_grid_thw"],
            "mm_token_type_ids": kinds,
        }

    def forget(self):
        self.model.model.rope_deltas = None

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

    def in_full(self, tokens):
        image, end = (self.token_text(i) for i in (self.config.image_token_id, self.config.eoi_token_id))
        return f"\n\n{self.placeholder}{image * tokens}{end}\n\n"

    def _placeholder(self):
        return self.token_text(self.config.boi_token_id)

    def _processed(self, pictures, most):
        tokens = self.config.mm_tokens_per_image
        if most and most != tokens:
            raise PopError(f"This model takes {tokens} tokens for every picture; {most:,} cannot be had.")
        made = self.processor([p.image for p in pictures], do_pan_and_scan=False, return_tensors="pt")
        height, width = made["pixel_values"].shape[-2:]
        side = round(tokens**0.5)
        return {"pixel_values": made["pixel_values"]}, [(side, side, width, height, 0)] * len(pictures)

    def stock_arguments(self, ids, pixels):
        seen = self.model.model.get_image_features(pixels.tensors["pixel_values"].to(self.device), return_dict=True)
        return {"mm_encoder_outputs": {"image": seen}, "token_type_ids": (ids == self.config.image_token_id).int()}

    def _seen(self, tensors):
        return self.model.model.get_image_features(**tensors, return_dict=True).pooler_output.flatten(0, 1), ()


def eyes_of(loaded) -> Eyes:
    """The eyes of a loaded model. Raises `PopError` for one that has none."""
    if not loaded.spec.sees:
        raise PopError(f"{loaded.name} reads text only and cannot see a picture; {WHO_SEES}.")
    return GemmaEyes(loaded) if loaded.spec.family == "gemma3" else QwenEyes(loaded)


def checked_most(value) -> int | None:
    """A number of tokens, or None. Raises `PopError`."""
    if value is None:
        return None
    most = whole_number(value, "number of image tokens")
    if not 4 <= most <= HIGHEST_MOST:
        raise PopError(f"The number of image tokens is {most:,}; it must be 4 to {HIGHEST_MOST:,}.")
    return most
