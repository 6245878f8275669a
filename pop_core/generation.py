"""One run in progress: what it owns, from its prompt to its answer. The engine holds what all runs share."""

import time

import torch

from .channel_facts import facts, removed_share
from .channels import OnlineChannels
from .decoder import Positions
from .errors import PopError
from .plan import Plan
from .prefill import full_slots
from .run import Run
from .sampling import Sampling, TextStream, choose
from .sight import Sight
from .state import State
from .stopping import Checkpoint, carry_on
from .text import Prompt


class Generation:
    """One run in progress. `prefill` once, then `step` until `done`; `result` at any time."""

    def __init__(
        self,
        engine,
        prompt: Prompt,
        plan: Plan,
        sampling: Sampling,
        checkpoint: Checkpoint = carry_on,
        sight: Sight | None = None,
    ):
        """sight: what the prompt's pictures give, if that is there already."""
        self.engine, self.prompt, self.plan, self.sampling, self.checkpoint = engine, prompt, plan, sampling, checkpoint
        self.stream = TextStream(engine.loaded.tokenizer, sampling.stop)
        self.generator = torch.Generator(engine.loaded.device).manual_seed(sampling.seed)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop: str | None = None
        self.state: State | None = None  # until the prompt is read
        self.prefill_ms = 0.0
        self.step_ms: list[float] = []
        self.sight = sight

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
        engine.prepare(self.plan)
        self.sight = self.sight or engine.look(self.prompt, self.checkpoint)
        start = time.perf_counter()
        logits, self.state = engine.read(ids, self.plan, self.sampling.max_new_tokens, self.checkpoint, self.sight)
        self._take(logits)
        self.write = self.engine.stepper(self.state)
        self.prefill_ms = (time.perf_counter() - start) * 1e3
        self.first_logits = logits[0]

    @torch.inference_mode()
    def step(self) -> None:
        """Write one more token."""
        self.checkpoint()
        start = time.perf_counter()
        self._take(self.write(self.last))
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        if isinstance(self.state.channels, OnlineChannels):
            self.state.channels.note()

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
        notices, pixels = list(self.prompt.notices), self.prompt.pixels
        vision_ms = self.sight.ms if self.sight else 0.0
        dropped = sorted({*range(layers)} - {*engine.kept_layers(plan)})
        online = self.state and isinstance(self.state.channels, OnlineChannels)
        static = self.state and not online
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
            ttft_ms=self.prompt.ms + vision_ms + self.prefill_ms,
            step_ms=list(self.step_ms),
            layers=layers,
            skipped_layers=skipped if full is not None else 0,
            full_tokens=length if full is None else full.shape[1],
            dropped_layers=dropped,
            # the first token comes from the prompt, which is read dense
            removed_share=removed_share(self.state, engine.spec) if self.step_ms or static else 0.0,
            channels=facts(self.state.channels) if online and self.done else None,
            device=str(engine.loaded.device),
            dtype=str(engine.loaded.dtype).removeprefix("torch."),
            image_tokens=self.prompt.image_tokens,
            vision_ms=vision_ms,
            pictures=list(pixels.facts) if pixels else [],
            notices=notices,
        )
