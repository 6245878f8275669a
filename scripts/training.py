"""What the trainings of the bundled models share: a checkpoint that is whole or as it was, and Muon."""

from pathlib import Path

import torch


def save_checkpoint(file: Path, state: dict) -> None:
    """Whole or as it was: an interrupted save must not cost the run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def state_to_resume(file: Path, resume: bool) -> dict | None:
    """What `save_checkpoint` saved last; None for a fresh start, which forgets the run before. Ends the script where
    there is nothing to resume."""
    if not resume:
        file.unlink(missing_ok=True)
        return None
    if not file.exists():
        raise SystemExit("There is no run to resume: none has reached its first checkpoint.")
    return torch.load(file, weights_only=True)


class Optimizer:
    """Muon for matrices, AdamW for the rest. `torch.optim.Muon` works in bfloat16, which costs this CPU twenty times as
    much; Muon itself is momentum, made orthogonal (Jordan et al., 2024), with the step of Liu et al., 2025."""

    def __init__(self, model, rate: float, matrix_rate: float, decay: float, clip: float):
        self.rate, self.matrix_rate, self.decay, self.clip = rate, matrix_rate, decay, clip
        named = dict(model.named_parameters())
        self.matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
        mine = {id(p) for p in self.matrices}
        rest = [p for p in named.values() if id(p) not in mine]
        self.adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]

    def step(self, scale: float, share) -> None:
        """scale: of the rates. share: maps a function over a list, on all cores."""
        torch.nn.utils.clip_grad_norm_([*self.matrices, *self.adam.param_groups[0]["params"]], self.clip)
        for group in self.adam.param_groups:
            group["lr"] = scale * self.rate
        self.adam.step()

        @torch.no_grad()  # what is switched off in one thread is not in another
        def one(pair):
            matrix, momentum = pair
            momentum.lerp_(matrix.grad, 0.05)
            update = orthogonal(matrix.grad.lerp(momentum, 0.95))
            rate = scale * self.matrix_rate
            matrix.mul_(1 - rate * self.decay).add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)

        list(share(one, zip(self.matrices, self.momenta, strict=True)))

    def state(self) -> dict:
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momenta = state["momenta"]


@torch.no_grad()
def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """About `U V^T` of the gradient's singular value decomposition, by five Newton-Schulz steps."""
    x = gradient / (gradient.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.T
