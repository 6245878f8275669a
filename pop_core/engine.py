"""One loaded model that answers prompts under plans.

The engine holds what all runs share (modules, projections); a `Generation` holds what one run owns (cache, positions,
random generator, text). Nothing of a run is ever left on the model.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from . import baselines, costs, kv_fit, memory
from .cache import KVCache, cache_bytes
from .channels import OnlineChannels, StaticChannels, column_norms
from .decode import StaticStep, decode_step, extend
from .decoder import Decoder, Positions
from .errors import Cancelled, PopError
from .generation import Generation
from .kv_projection import ModuleProjection, own_projection
from .loading import LoadedModel
from .pictures import in_a_row
from .plan import ALL, DENSE, FITTED, NONE, SHORTGPT, ChannelPruning, Plan
from .prefill import prefill
from .run import Run
from .sampling import Sampling, end_ids
from .sight import Sight
from .state import State
from .stopping import Checkpoint, carry_on
from .text import Prompt, encode_prompt
from .vision import Eyes, eyes_of

PROJECTIONS_KEPT = 4  # fused projections of recently used cutoffs; each is as large as the skipped K/V weights


class Engine:
    """Runs plans on one model, one at a time: whoever works on the model holds `exclusive()`."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.decoder = Decoder(loaded.model, loaded.spec)
        self.ends = end_ids(loaded.model, loaded.tokenizer)
        self._lock = threading.Lock()
        self._projections: OrderedDict = OrderedDict()
        self.statistics: baselines.Statistics | None = None  # of the calibration text; `baselines.ensure` makes them
        self._norms: dict[str, list] = {}  # by score
        self._static: tuple | None = None  # the baseline used last, and its weights

    @property
    def spec(self):
        return self.loaded.spec

    @contextmanager
    def exclusive(self, checkpoint: Checkpoint = carry_on):
        """Hold the model. Waiting for it can be cancelled; it is free again however the block ends."""
        while not self._lock.acquire(timeout=0.05):
            checkpoint()
        try:
            yield
        finally:
            self._lock.release()

    @cached_property
    def eyes(self) -> Eyes:
        """What the model sees with. Raises `PopError` for one that reads text only."""
        return eyes_of(self.loaded)

    def encode(
        self,
        text: str,
        sampling: Sampling,
        chat: bool | None = None,
        images: Sequence = (),
        image_tokens: int | None = None,
    ) -> Prompt:
        """Tokenise, with `images` in front of the text, and check lengths. images: anything that `open_picture` takes,
        one or several. image_tokens: as for `Eyes.prepare`. Raises `PopError` if prompt plus answer are longer than
        the model's context, and for pictures where the model has no eyes."""
        images = in_a_row(images)
        eyes = self.eyes if images else None
        prompt = encode_prompt(self.loaded.tokenizer, text, chat, eyes, images, image_tokens)
        self.check_length(len(prompt.ids), sampling.max_new_tokens, prompt.image_tokens)
        return prompt

    def look(self, prompt: Prompt | None, checkpoint: Checkpoint = carry_on) -> Sight | None:
        """Run the vision tower on a prompt's pictures; None where there are none. checkpoint: as for `Eyes.look`."""
        if prompt is None or not prompt.pixels:
            return None
        return self.eyes.look(self.token_ids(prompt.ids), prompt.pixels, checkpoint)

    def check_length(self, prompt_tokens: int, new_tokens: int, image_tokens: int = 0) -> None:
        """Raise before a run that the model's context, or the memory left, cannot hold. image_tokens: of the prompt's;
        they are never cut off."""
        room = self.spec.max_positions
        if prompt_tokens + new_tokens > room:
            of_pictures = f", {image_tokens:,} of them for pictures," if image_tokens else ""
            raise PopError(
                f"The prompt has {prompt_tokens:,} tokens{of_pictures} and the answer may have {new_tokens:,}; "
                f"together at most {room:,} fit this model's context."
            )
        need = cache_bytes(self.spec, 1, prompt_tokens + new_tokens, self.loaded.dtype)
        memory.require(need, self.loaded.device, "the keys and values of this prompt")

    def check(self, plan: Plan, sees: bool = False) -> None:
        """Raise `PopError` for a plan that this model cannot run, before anything of it runs. sees: the prompt has
        pictures, which a model without eyes cannot have."""
        plan.check(self.spec.layers)
        cut, least = plan.prefill, self.spec.deepstack if sees and self.eyes else 0
        if cut and cut.cutoff < least:
            raise PopError(
                f"The cutoff is {cut.cutoff}, but this model adds pictures after each of its first {least} layers "
                f"(DeepStack), so with a picture it must be {least} to {self.spec.layers}."
            )
        if plan.online or plan.static:
            what = "Channel pruning" if plan.online else f"The baseline {plan.static.name}"
            self.require_readable(what, "run it without")
        if need := self.copied_bytes(plan):
            memory.require(need, self.loaded.device, "the copy of the channels that are kept")

    def copied_bytes(self, plan: Plan) -> int:
        """What a plan's copy of the channels that it keeps takes beside the model; 0 where it is there already."""
        kept, static = plan.online, plan.static
        if static and static.name != SHORTGPT and (self._static is None or self._static[0] != static):
            kept = ChannelPruning(static.ratio, rescore=NONE)
        if not kept or kept.rescore == ALL:
            return 0
        return costs.sliced_bytes(self.spec, kept, self.loaded.dtype.itemsize)

    def stepper(self, state: State) -> Callable[[torch.Tensor], torch.Tensor]:
        """The decode step of this device: tokens `[1, 1]` to the logits of the next, `[1, vocab]`."""
        if self.loaded.device.type == "cuda":
            return StaticStep(state.decoder, state.cache, state.positions, ffn=state.ffn)
        return lambda tokens: decode_step(state.decoder, state.cache, state.positions, tokens, state.ffn)

    def prepare(self, plan: Plan) -> None:
        """Make what runs of a plan share: set-up that is part of no run. What `read` needs and is not there is made.

        Raises `PopError` if fitted projections (`kv_fit.fit`) or calibration (`baselines.ensure`) are not there.
        """
        self.projection(plan)
        # made outside inference mode: they outlive the run
        with torch.inference_mode(False), torch.no_grad():
            if plan.online:
                self.column_norms(plan.online.score)
            baseline = plan.static
            if baseline and self.statistics is None:
                raise PopError(f"The baseline {baseline.name} has not seen its calibration text yet.")
            if baseline and baseline.name != SHORTGPT and (self._static is None or self._static[0] != baseline):
                self._static = None  # before the next one is made: both need not fit
                self._static = baseline, baselines.static_channels(self.decoder, self.statistics, baseline)

    def drop_static(self) -> None:
        """Let go of the weights of the baseline that was used last."""
        self._static = None

    def column_norms(self, score: str) -> list[list[torch.Tensor]]:
        """`channels.column_norms`, made once."""
        if score not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._norms[score] = column_norms(self.decoder, score)
        return self._norms[score]

    def _parts(self, plan: Plan) -> tuple[Decoder, OnlineChannels | StaticChannels | None]:
        """The decoder and the channels of one run."""
        if online := plan.online:
            return self.decoder, OnlineChannels(self.decoder, online, self.column_norms(online.score))
        if not plan.static:
            return self.decoder, None
        if plan.static.name == SHORTGPT:
            return self.decoder.keeping(self.kept_layers(plan)), None
        return self.decoder, self._static[1]

    def kept_layers(self, plan: Plan) -> list[int]:
        """The layers that a plan has at all: all of them, but for ShortGPT, once it has seen its calibration text."""
        if not plan.static or plan.static.name != SHORTGPT or not self.statistics:
            return list(range(self.spec.layers))
        return baselines.kept_layers(self.decoder, self.statistics, plan.static.ratio, costs.ffn_share(self.spec))

    def projection(self, plan: Plan):
        """The projection that a plan's skipped layers need, built once per cutoff; None when nothing is skipped.

        Raises `PopError` if fitted projections are asked for and not there (`kv_fit.fit` makes them).
        """
        cut = plan.prefill
        if cut is None or cut.cutoff >= self.spec.layers:
            return None
        key = cut.cutoff, cut.kv
        if key not in self._projections:
            # made outside inference mode: it outlives the run
            with torch.inference_mode(False), torch.no_grad():
                self._projections[key] = self._make_projection(cut)
            while len(self._projections) > PROJECTIONS_KEPT:
                self._projections.popitem(last=False)
        self._projections.move_to_end(key)
        return self._projections[key]

    def _make_projection(self, cut):
        if cut.kv == FITTED:
            self.require_readable("A fitted projection", "use own projections")
            return kv_fit.load(self.decoder, self.loaded.identity(), cut.cutoff)
        return own_projection(self.decoder, cut.cutoff) if self.readable else ModuleProjection()

    @property
    def readable(self) -> bool:
        """Whether weights can be read, and not only called through their modules."""
        return self.decoder.readable

    def require_readable(self, what: str, instead: str) -> None:
        """Raise `PopError` when `what` needs weights that cannot be read. instead: what can be done."""
        if not self.readable:
            raise PopError(f"{what} reads the model's weights, which are packed or offloaded here; {instead}.")

    @torch.inference_mode()
    def read(
        self,
        ids: torch.Tensor,
        plan: Plan,
        new_tokens: int,
        checkpoint: Checkpoint = carry_on,
        sight: Sight | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Prefill `[1, N]` under a plan, partition of the channels included: the logits after the prompt `[1, vocab]`,
        and the state to write `new_tokens` more from. sight: of the prompt's pictures."""
        self.check(plan, sight is not None)
        self.prepare(plan)
        decoder, channels = self._parts(plan)
        capacity = ids.shape[1] + new_tokens
        cache = KVCache(decoder.spec, len(ids), capacity, decoder.devices, self.loaded.dtype)
        positions = Positions.build(decoder, capacity, ids.device, sight=sight)
        reading, project = channels and channels.reading, self.projection(plan)
        logits = prefill(decoder, cache, positions, ids, plan.prefill, project, checkpoint, reading, sight)
        if channels:
            checkpoint()
            channels.partition()
        return logits, State(decoder, cache, positions, channels, channels and channels.writing)

    @torch.inference_mode()
    def continuation_logits(
        self, ids: torch.Tensor, continuation: torch.Tensor, plan: Plan, sight: Sight | None = None
    ) -> torch.Tensor:
        """Teacher forcing: read `[1, N]` under a plan, then the known `[1, C]` as if it were written.

        Returns `[C, vocab]`: row `t` predicts `continuation[t]`. Prompt log-probabilities are not valid under a
        prefill cut, so none are offered.
        """
        return self.continuation(ids, continuation, plan, sight)[0]

    @torch.inference_mode()
    def continuation(
        self, ids: torch.Tensor, continuation: torch.Tensor, plan: Plan, sight: Sight | None = None
    ) -> tuple[torch.Tensor, State]:
        """The same, with the state that it ends in."""
        first, state = self.read(ids, plan, continuation.shape[1], sight=sight)
        if continuation.shape[1] == 1:
            return first, state
        rest = extend(state.decoder, state.cache, state.positions, continuation[:, :-1], state.ffn)[0]
        return torch.cat((first, rest)), state

    def token_ids(self, ids) -> torch.Tensor:
        """Ids as `[1, N]` on the model's device. Raises `PopError` for ids that the model has no embedding for."""
        if max(ids) >= self.spec.vocab:
            raise PopError(
                f"The tokenizer gives token {max(ids):,}, but the model knows {self.spec.vocab:,}: they do not match."
            )
        return torch.tensor([list(ids)], device=self.loaded.device)

    def generate(
        self,
        text: str,
        plan: Plan = DENSE,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        checkpoint: Checkpoint = carry_on,
        images: Sequence = (),
        image_tokens: int | None = None,
    ) -> Run:
        """Answer a prompt, with `images` in front of its text (as for `encode`). A checkpoint that raises `Cancelled`
        ends the run within one step and keeps its text."""
        *_, last = self.stream(text, plan, sampling, chat, checkpoint, images, image_tokens)
        return last.result()

    def stream(
        self,
        text: str,
        plan: Plan = DENSE,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        checkpoint: Checkpoint = carry_on,
        images: Sequence = (),
        image_tokens: int | None = None,
    ) -> Iterator[Generation]:
        """As `generate`, yielding the `Generation` after the prefill and after each token."""
        sampling = sampling or Sampling()
        prompt = self.encode(text, sampling, chat, images, image_tokens)
        self.check(plan, sees=prompt.pixels is not None)
        with self.exclusive(checkpoint):
            generation = Generation(self, prompt, plan, sampling, checkpoint)
            try:
                generation.prefill()
                yield generation
                while not generation.done:
                    generation.step()
                    yield generation
            except Cancelled:
                generation.cancel()
                yield generation
