"""One loaded model that answers prompts under plans.

The engine holds what all runs share (modules, projections); a `Generation` holds what one run owns (cache, positions,
random generator, text). Nothing of a run is ever left on the model.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import kv_fit, memory
from .cache import KVCache, cache_bytes
from .decode import StaticStep, decode_step, extend
from .decoder import Decoder, Positions
from .errors import Cancelled, PopError
from .kv_projection import ModuleProjection, own_projection
from .loading import LoadedModel
from .plan import DENSE, FITTED, Plan
from .prefill import full_slots, prefill
from .run import Run
from .sampling import Sampling, TextStream, choose, end_ids
from .stopping import Checkpoint, carry_on
from .text import Prompt, encode_prompt

PROJECTIONS_KEPT = 4  # fused projections of recently used cutoffs; each is as large as the skipped K/V weights


class Engine:
    """Runs plans on one model, one at a time: whoever works on the model holds `exclusive()`."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self.decoder = Decoder(loaded.model, loaded.spec)
        self.ends = end_ids(loaded.model, loaded.tokenizer)
        self._lock = threading.Lock()
        self._projections: OrderedDict = OrderedDict()

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

    def encode(self, text: str, sampling: Sampling, chat: bool | None = None) -> Prompt:
        """Tokenise and check lengths. Raises `PopError` if prompt plus answer are longer than the model's context."""
        prompt = encode_prompt(self.loaded.tokenizer, text, chat)
        self.check_length(len(prompt.ids), sampling.max_new_tokens)
        return prompt

    def check_length(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise before a run that the model's context, or the memory left, cannot hold."""
        room = self.spec.max_positions
        if prompt_tokens + new_tokens > room:
            raise PopError(
                f"The prompt has {prompt_tokens:,} tokens and the answer may have {new_tokens:,}; together at most "
                f"{room:,} fit this model's context."
            )
        need = cache_bytes(self.spec, 1, prompt_tokens + new_tokens, self.loaded.dtype)
        memory.require(need, self.loaded.device, "the keys and values of this prompt")

    def state(self, ids: torch.Tensor, new_tokens: int, pad: torch.Tensor | None = None) -> tuple[KVCache, Positions]:
        """A fresh cache and positions for `[B, N]` prompts (left-padded by `pad`) and `new_tokens` more."""
        capacity = ids.shape[1] + new_tokens
        cache = KVCache(self.spec, len(ids), capacity, self.decoder.devices, self.loaded.dtype)
        return cache, Positions.build(self.decoder, capacity, ids.device, pad)

    def stepper(self, cache: KVCache, positions: Positions) -> Callable[[torch.Tensor], torch.Tensor]:
        """The decode step of this device: tokens `[1, 1]` to the logits of the next, `[1, vocab]`."""
        if self.loaded.device.type == "cuda":
            return StaticStep(self.decoder, cache, positions)
        return lambda tokens: decode_step(self.decoder, cache, positions, tokens)

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
            self.require_readable("A fitted projection")
            return kv_fit.load(self.decoder, self.loaded.identity(), cut.cutoff)
        return own_projection(self.decoder, cut.cutoff) if self.readable else ModuleProjection()

    @property
    def readable(self) -> bool:
        """Whether weights can be read, and not only called through their modules."""
        return self.decoder.readable

    def require_readable(self, what: str) -> None:
        """Raise `PopError` when `what` needs weights that cannot be read."""
        if not self.readable:
            raise PopError(
                f"{what} reads the model's weights, which are packed or offloaded here; use own projections."
            )

    @torch.inference_mode()
    def read(self, ids: torch.Tensor, plan: Plan, new_tokens: int, checkpoint: Checkpoint = carry_on):
        """Prefill `[1, N]` under a plan: the logits after the prompt `[1, vocab]`, the cache and the positions."""
        plan.check(self.spec.layers)
        projection = self.projection(plan)
        cache, positions = self.state(ids, new_tokens)
        return prefill(self.decoder, cache, positions, ids, plan.prefill, projection, checkpoint), cache, positions

    @torch.inference_mode()
    def continuation_logits(self, ids: torch.Tensor, continuation: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Teacher forcing: read `[1, N]` under a plan, then the known `[1, C]` through the full model.

        Returns `[C, vocab]`: row `t` predicts `continuation[t]`. Prompt log-probabilities are not valid under a
        prefill cut, so none are offered.
        """
        first, cache, positions = self.read(ids, plan, continuation.shape[1])
        if continuation.shape[1] == 1:
            return first
        rest = extend(self.decoder, cache, positions, continuation[:, :-1])[0]
        return torch.cat((first, rest))

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
    ) -> Run:
        """Answer a prompt. A checkpoint that raises `Cancelled` ends the run within one step and keeps its text."""
        *_, last = self.stream(text, plan, sampling, chat, checkpoint)
        return last.result()

    def stream(
        self,
        text: str,
        plan: Plan = DENSE,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        checkpoint: Checkpoint = carry_on,
    ) -> Iterator["Generation"]:
        """As `generate`, yielding the `Generation` after the prefill and after each token."""
        sampling = sampling or Sampling()
        plan.check(self.spec.layers)
        prompt = self.encode(text, sampling, chat)
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


class Generation:
    """One run in progress. `prefill` once, then `step` until `done`; `result` at any time."""

    def __init__(
        self, engine: Engine, prompt: Prompt, plan: Plan, sampling: Sampling, checkpoint: Checkpoint = carry_on
    ):
        self.engine, self.prompt, self.plan, self.sampling, self.checkpoint = engine, prompt, plan, sampling, checkpoint
        self.stream = TextStream(engine.loaded.tokenizer, sampling.stop)
        self.generator = torch.Generator(engine.loaded.device).manual_seed(sampling.seed)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop: str | None = None
        self.prefill_ms = 0.0
        self.step_ms: list[float] = []

    @property
    def done(self) -> bool:
        return self.stop is not None

    @property
    def text(self) -> str:
        return self.stream.text

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt and choose the first token; keeps the first token's logits in `first_logits` `[vocab]`."""
        engine = self.engine
        ids = engine.token_ids(self.prompt.ids)
        engine.projection(self.plan)  # loading or folding it is set-up, not prefill
        start = time.perf_counter()
        logits, self.cache, self.positions = engine.read(ids, self.plan, self.sampling.max_new_tokens, self.checkpoint)
        self._take(logits)
        self.write = self.engine.stepper(self.cache, self.positions)
        self.prefill_ms = (time.perf_counter() - start) * 1e3
        self.first_logits = logits[0]

    @torch.inference_mode()
    def step(self) -> None:
        """Write one more token."""
        self.checkpoint()
        start = time.perf_counter()
        self._take(self.write(self.last))
        self.step_ms.append((time.perf_counter() - start) * 1e3)

    def cancel(self) -> None:
        self.stop = "cancelled"

    def _take(self, logits: torch.Tensor) -> None:
        self.last = choose(logits, self.sampling, self.generator)
        token = self.last.item()  # the one wait for the device
        if token < 0:
            raise PopError("The model produced numbers that are not finite, so there is no next token to choose.")
        if token in self.engine.ends:
            self.stop = "end"
            return
        self.tokens.append(token)
        self.pieces.append(self.stream.push(token))
        if self.stream.stopped:
            self.stop = "stop"
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.stop = "length"

    def result(self) -> Run:
        """The run so far, as plain data."""
        engine, plan, length = self.engine, self.plan, len(self.prompt.ids)
        cut, layers = plan.prefill, engine.spec.layers
        skipped = 0 if cut is None else max(0, layers - cut.cutoff)
        full = full_slots(length, cut, Positions({}), "cpu") if skipped else None
        notices = list(self.prompt.notices)
        if skipped and full is None:
            notices.append(f"Nothing was skipped: all {length} prompt tokens are sinks or boundary.")
        return Run(
            model=engine.loaded.name,
            plan=plan.to_dict(),
            sampling=self.sampling.to_dict(),
            prompt=self.prompt.text,
            chat=self.prompt.chat,
            text=self.stream.finish() if self.done else self.stream.text,
            tokens=list(self.tokens),
            pieces=list(self.pieces),
            stop=self.stop or "cancelled",
            prompt_tokens=length,
            new_tokens=len(self.tokens),
            prefill_ms=self.prefill_ms,
            ttft_ms=self.prompt.ms + self.prefill_ms,
            step_ms=list(self.step_ms),
            layers=layers,
            skipped_layers=skipped if full is not None else 0,
            full_tokens=length if full is None else full.shape[1],
            device=str(engine.loaded.device),
            dtype=str(engine.loaded.dtype).removeprefix("torch."),
            notices=notices,
        )
