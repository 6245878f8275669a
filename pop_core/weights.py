"""Whether a model's weights can be read, and not only called through their modules."""

import torch

from .placement import DTYPES

PLAIN_DTYPES = (torch.float64, *DTYPES.values())


def packed(layers) -> bool:
    """Whether a weight of the decoder layers is quantised: it can be called, but not read, sliced or fitted."""
    linears = [module for name, module in layers.named_modules() if name.endswith("_proj")]
    return not all(isinstance(getattr(m, "weight", None), torch.Tensor) for m in linears) or not all(
        type(p.data) is torch.Tensor and p.dtype in PLAIN_DTYPES for p in layers.parameters()
    )


def offloaded(module) -> bool:
    """Whether some weights are on the CPU or disk and only visit the device while their module is called."""
    return any(parameter.is_meta for parameter in module.parameters())
