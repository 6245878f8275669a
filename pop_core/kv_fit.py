"""Fitted K/V projections (ours): what a skipped layer's keys and values would have been, guessed from the cutoff.

The paper feeds `h_c` to weights that expect `h_l`. Here each skipped layer gets a ridge regression from
`x = h_c / rms(h_c)` to the dense model's own `[K_l; V_l]` before key norm and RoPE, fitted on the residual against the
own-weight projection, with centred features and a bias. The result has the shape of the own projection, so it costs
nothing at run time. One pass over what the model is calibrated on (`calibration.py`) serves every cutoff. Method and
measured values: README.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .calibration import KINDS, MOST_UNKNOWN, SCENE_SEED, SCENES, SCENES_ALONE, SEGMENT, Calibration, read_kind
from .decoder import Decoder, Positions
from .embedded import cache_dir
from .errors import PopError
from .kv_projection import FusedProjection, folded_weight, unit_rms
from .plan import DENSE, FITTED, Plan
from .prefill import CausalAttention
from .sight import Sight
from .stopping import Checkpoint, carry_on
from .timing import interleaved

LEFT_OUT = 4  # first positions of a sample: attention sinks, whose huge activations would rule the regression
RIDGE = 0.1  # lambda, as a share of the mean feature energy
EQUATIONS = 1.3  # reading plus accumulating and solving, over reading alone (measured on smollm2)
MEMORY = 2 << 30  # bytes that the normal equations of one pass may take


def fitted_path(identity: str, cutoff: int, sees: bool) -> Path:
    """Where the projections of these weights and this calibration are kept. sees: the model has eyes."""
    return cache_dir() / "fitted" / f"{identity[:20]}-{_calibration_key(sees)}" / f"cutoff-{cutoff}.safetensors"


def is_fitted(engine, cutoff: int) -> bool:
    """Whether a whole file is there; a damaged one is made again."""
    try:
        with safe_open(fitted_path(engine.loaded.identity(), cutoff, engine.spec.sees), "pt") as file:
            return {"weight", "bias"} <= set(file.keys())
    except (OSError, SafetensorError):
        return False


def load(decoder: Decoder, identity: str, cutoff: int) -> FusedProjection:
    """The fitted projection of a cutoff. Raises `PopError` if it was not fitted yet."""
    path = fitted_path(identity, cutoff, decoder.spec.sees)
    if not path.exists():
        raise PopError(f"No projections are fitted for cutoff {cutoff} yet; fit them first, or use own projections.")
    try:
        with safe_open(path, "pt", device=str(decoder.devices[cutoff - 1])) as file:
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
    except (OSError, SafetensorError) as error:
        raise PopError(f"The fitted projections in {path} cannot be read ({error}); delete the file.") from None
    rows = 2 * decoder.spec.kv_width * (decoder.spec.layers - cutoff)
    if weight.shape != (rows, decoder.spec.hidden) or bias.shape != (rows,) or not weight.isfinite().all():
        raise PopError(f"The fitted projections in {path} are not those of this model; delete the file.")
    return FusedProjection(cutoff, weight.to(decoder.dtype), bias.to(decoder.dtype))


def ensure(engine, plan: Plan, progress=None, checkpoint: Checkpoint = carry_on) -> None:
    """Fit what a plan needs, if it needs anything that is not on disk yet. Holds the model while it works.

    Raises `PopError` for packed or offloaded weights.
    """
    cut, decoder = plan.prefill, engine.decoder
    if cut is None or cut.kv != FITTED or cut.cutoff >= decoder.spec.layers:
        return
    engine.require_readable("A fitted projection", "use own projections")
    if is_fitted(engine, cut.cutoff):
        return
    with engine.exclusive(checkpoint):
        if not is_fitted(engine, cut.cutoff):  # somebody may have fitted while we waited
            fit(engine, Calibration(engine), cutoffs_to_fit(decoder, cut.cutoff), progress, checkpoint)


def estimate_seconds(engine) -> float:
    """About how long fitting takes on this machine: one short dense read, scaled to the calibration text, and one
    picture from its drawing to its dense read, times all."""
    calibration, text = Calibration(engine), engine.token_ids([0] * (SEGMENT // 4))
    tasks = {"text": lambda: engine.read(text, DENSE, 0)}

    def scene():
        sample = calibration[len(calibration) - 1]
        engine.read(engine.token_ids(sample.ids), DENSE, 0, sight=engine.look(sample.prompt))

    if calibration.scenes:
        tasks["scene"] = scene
    with engine.exclusive():
        times = interleaved(tasks, 1, engine.loaded.device)
    milliseconds = times["text"][0] * sum(map(len, calibration.texts)) / (SEGMENT // 4)
    if calibration.scenes:
        milliseconds += times["scene"][0] * calibration.scenes
    return milliseconds / 1e3 * EQUATIONS


def cutoffs_to_fit(decoder: Decoder, wanted: int) -> list[int]:
    """The cutoffs of one pass: `wanted` and, where their equations fit in memory, all from half the layers up."""
    spec = decoder.spec
    every = sorted({wanted, *range(max(1, spec.layers // 2), spec.layers)})
    need = sum(4 * spec.hidden * (spec.hidden + 2 * spec.kv_width * (spec.layers - c)) for c in every)
    return every if need <= MEMORY else [wanted]


def fit(engine, samples: Sequence, cutoffs: list[int], progress=None, checkpoint: Checkpoint = carry_on) -> float:
    """Fit and save the projections of `cutoffs`; returns the seconds it took.

    samples: `samples.Sample`s. progress: called with a fraction and a sentence. checkpoint: may raise to abandon the
    fit; nothing is saved then.
    """
    start = time.perf_counter()
    decoder, identity = engine.decoder, engine.loaded.identity()
    with _writing_to(fitted_path(identity, cutoffs[0], decoder.spec.sees).parent):
        pass  # found out now, and not after a minute's work
    with torch.inference_mode():
        equations = {c: _NormalEquations(decoder, c) for c in cutoffs}
        weights = {i: folded_weight(decoder, i)[0] for i in range(min(cutoffs), decoder.spec.layers)}
        for count, sample in enumerate(samples, start=1):
            checkpoint()
            sight = engine.look(sample.prompt, checkpoint)
            features = _features(decoder, sample.ids, min(cutoffs), sight)
            targets = {i: torch.nn.functional.linear(x, weights[i]) for i, x in features.items()}
            for c, equation in equations.items():
                equation.add(features[c], torch.cat([targets[i] for i in range(c, decoder.spec.layers)], dim=1))
            if progress:
                what = "texts and pictures" if decoder.spec.sees else "texts"
                progress(count / (len(samples) + 1), f"fitting projections: {count} of {len(samples)} {what}")
        for c, equation in equations.items():
            _save(fitted_path(identity, c, decoder.spec.sees), equation.solve())
    return time.perf_counter() - start


class _NormalEquations:
    """Sums over tokens for one cutoff: enough to solve the regression, small enough to keep for every cutoff."""

    def __init__(self, decoder: Decoder, cutoff: int):
        spec, device = decoder.spec, decoder.devices[cutoff - 1]
        folded = [folded_weight(decoder, i) for i in range(cutoff, spec.layers)]
        self.own = torch.cat([weight.to(device) for weight, _ in folded])  # [S * 2 * kv_width, hidden]
        biases = [bias for _, bias in folded if bias is not None]
        self.own_bias = torch.cat([b.to(device) for b in biases]) if biases else torch.zeros(len(self.own)).to(device)
        self.count = 0
        self.sum_x = torch.zeros(spec.hidden, device=device)
        self.sum_y = torch.zeros(len(self.own), device=device)
        self.xx = torch.zeros(spec.hidden, spec.hidden, device=device)
        self.xy = torch.zeros(spec.hidden, len(self.own), device=device)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: `[N, hidden]` features at the cutoff; y: `[N, S * 2 * kv_width]` the dense model's K and V, no bias."""
        x, y = x.to(self.xx.device), y.to(self.xx.device)
        self.count += len(x)
        self.sum_x += x.sum(0)
        self.sum_y += y.sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The projection's weight `[S * 2 * kv_width, hidden]` and bias."""
        own, xx = self.own.double(), self.xx.double()
        mean_x, mean_y = self.sum_x.double() / self.count, self.sum_y.double() / self.count
        mean_r = mean_y - own @ mean_x  # the residual: what the own weights miss
        gram = xx - self.count * torch.outer(mean_x, mean_x)
        cross = self.xy.double() - xx @ own.T - self.count * torch.outer(mean_x, mean_r)
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        correction = torch.cholesky_solve(cross, torch.linalg.cholesky(gram))
        bias = self.own_bias.double() + mean_r - mean_x @ correction
        return (own + correction.T).float(), bias.float()


def _features(
    decoder: Decoder, tokens: Sequence[int], first: int, sight: Sight | None = None
) -> dict[int, torch.Tensor]:
    """Dense forward of one sample: layer -> `h / rms(h)` before it, `[N - LEFT_OUT, hidden]`, from `first` up."""
    spec, ids = decoder.spec, torch.tensor([tokens], device=decoder.devices[0])
    positions = Positions.build(decoder, len(tokens), ids.device, sight=sight)
    attend, rope = CausalAttention(decoder, positions, len(tokens)), positions.span(0, len(tokens))
    h, features = decoder.embed(ids, sight), {}
    for i in range(spec.layers):
        if i >= first:
            features[i] = unit_rms(h[0, LEFT_OUT:], spec.rms_eps)
        if i < spec.layers - 1:  # the last layer's own output is nobody's key or value
            h = decoder.block(i, h, rope, attend, sight=sight)
    return features


def _save(path: Path, projection: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write beside and rename, so that a file that exists is whole."""
    weight, bias = projection
    part = path.with_suffix(f".{time.time_ns()}.part")
    with _writing_to(path.parent):
        save_file({"weight": weight.cpu().contiguous(), "bias": bias.cpu().contiguous()}, part)
        part.replace(path)


@contextmanager
def _writing_to(folder: Path):
    """Make the folder; what goes wrong while writing to it is one sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise PopError(f"The fitted projections cannot be written to {folder}: {error}.") from None


def _calibration_key(sees: bool) -> str:
    digest = hashlib.sha256(repr((SEGMENT, LEFT_OUT, RIDGE)).encode())
    for kind in KINDS:
        digest.update(read_kind(kind).encode())
    if sees:
        digest.update(repr((MOST_UNKNOWN, SCENES, SCENES_ALONE, SCENE_SEED)).encode())
    return digest.hexdigest()[:8]
