"""Memory: what is free on a device, what a model takes, a refusal in one sentence before or when it runs out."""

from collections.abc import Callable

import psutil
import torch

from . import cgroup
from .checkpoint import model_class
from .errors import BrokenModel, NotEnoughMemory, first_line
from .units import gigabytes


def free_bytes(device) -> int:
    """Bytes free on `device`: for the CPU what the system can give, or less where a cgroup limits this process."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what torch has taken from the driver and does not use is free to us, if to nobody else
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available, limit = psutil.virtual_memory().available, cgroup.memory_free()
    return available if limit is None else min(available, limit)


def model_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of all parameters of the model `config` in `dtype`, tied ones once.

    For a quantised checkpoint the linear layers count with their stored bits per weight. Raises `BrokenModel` for a
    config that no model can be made of.
    """
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the model classes raise about sizes that cannot be
        raise BrokenModel(f"No model can be made of this config ({first_line(error)}).") from error
    packed = _stored_bits(getattr(config, "quantization_config", None))
    linear = {id(m.weight) for m in model.get_decoder().layers.modules() if isinstance(m, torch.nn.Linear)}
    bits = sum(
        parameter.numel() * (packed if packed and id(parameter) in linear else 8 * dtype.itemsize)
        for parameter in model.parameters()
    )
    return bits // 8


def require(bytes_needed: int, device, what: str) -> None:
    """Raise `NotEnoughMemory` unless `bytes_needed` are free on `device`; `what` is their subject in the sentence."""
    free = free_bytes(device)
    if bytes_needed > free:
        raise NotEnoughMemory(
            f"Not enough memory: {what} needs about {gigabytes(bytes_needed)}, and {gigabytes(free)} is free "
            f"on {torch.device(device)}."
        )


def guarded(task: Callable[[], object], sentence: str):
    """`task()`; if memory runs out in it, `NotEnoughMemory` with this sentence, and what it had taken is free again."""
    try:
        return task()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    # outside of the handler: the error's traceback holds every tensor of the task
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise NotEnoughMemory(f"{sentence} The model is unharmed.")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def _stored_bits(quantisation) -> int | None:
    if quantisation is None:
        return None
    entries = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    if entries.get("load_in_4bit"):
        return 4
    return entries.get("bits") or 8
