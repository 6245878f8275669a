"""From what a person types to a model that is ready to run, or to one sentence that says why not.

The order is the point: the name is resolved, the config alone is read, and the family and the memory are checked
before any weight is downloaded or opened.
"""

import hashlib
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import checkpoint, embedded, gguf_model, hub, memory, weights
from .errors import BrokenModel, ModelNotFound, PopError
from .families import DecoderSpec, read_spec
from .gguf_reader import GgufFile, read_gguf
from .gguf_tokenizer import read_tokenizer
from .placement import choose_device, choose_dtype, fit_threads
from .vision import check_eyes

EMBEDDED, HUB, FOLDER, GGUF = "embedded", "hub", "folder", "gguf"
ALLOWED = f"use {', '.join(embedded.MODELS)}, a local folder, a .gguf file, or a hub model as owner/name"
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
FETCHED = 0.9  # the share of the progress bar that fetching takes


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in eval mode without gradients, and what there is to know about it.

    `device` is where token ids go. `parameters` counts tied ones once. `source` is "embedded", "hub", "folder" or
    "gguf". `notices` are sentences that the person should see. `image_processor`: of a model that sees.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    parameters: int
    source: str
    notices: tuple[str, ...] = ()
    image_processor: object = None

    @property
    def packed(self) -> bool:
        """Whether a decoder layer's weights are quantised."""
        return weights.packed(self.model.get_decoder().layers)

    @property
    def offloaded(self) -> bool:
        """Whether some weights are not on the device that computes."""
        return weights.offloaded(self.model)

    def identity(self) -> str:
        """sha256 over the names, shapes, dtypes and bytes of all parameters; computed once.

        Raises `PopError` for offloaded weights.
        """
        return self._identity

    @cached_property
    def _identity(self) -> str:
        if self.offloaded:
            raise PopError(
                f"The weights of {self.name} are offloaded, so they cannot be hashed; load it on one device."
            )
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def load_model(name: str, device: str = "auto", dtype: str = "auto", progress=None, device_map=None) -> LoadedModel:
    """Load `name`: an embedded model, a local folder, a local .gguf file, a hub id `owner/name` or its URL.

    device: "auto" (CUDA if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
    dtype: "auto" (float32 on the CPU, bfloat16 on CUDA), "float32", "bfloat16" or "float16".
    progress: called as `progress(fraction, text)`; what it raises stops the loading.
    device_map: None for one device; "auto" or a dict lets accelerate spread or offload the layers.
    Raises the errors of `pop_core.errors`, each one sentence.
    """
    name, source = resolve(name)
    device = choose_device(device)
    number_format = choose_dtype(dtype, device)
    report = progress or (lambda fraction, text: None)
    placement = {"device_map": device_map if device_map is not None else {"": device}}
    if device.type == "cpu":
        fit_threads()

    def admit(config) -> DecoderSpec:
        """Everything that can be refused before weights are touched."""
        spec = read_spec(config)
        if spec.family.startswith("gemma") and number_format == torch.float16:
            raise PopError("Gemma overflows in float16; use bfloat16 or float32.")
        if device_map is None:
            memory.require(memory.model_bytes(config, number_format), device, f"{name} in {_short(number_format)}")
        return spec

    parts = _from_gguf if source == GGUF else _from_folder
    model, tokenizer, image_processor, spec, notices = parts(name, source, admit, report, number_format, placement)
    report(1.0, f"{name} is ready")
    loaded = LoadedModel(
        name=name,
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        spec=spec,
        device=_input_device(model),
        dtype=number_format,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        source=source,
        image_processor=image_processor,
    )
    if spec.sees:
        check_eyes(loaded)
    return replace(loaded, notices=tuple(filter(None, (*notices, *_limits(loaded)))))


def _from_gguf(path, source, admit, report, number_format, placement):
    """(model, tokenizer, image processor or None, spec, notices) of a .gguf file. admit: the spec of a config, or an
    error."""
    file = read_gguf(path)
    config = gguf_model.read_config(file)
    spec = admit(config)
    tokenizer, notices = read_tokenizer(file)
    model = gguf_model.load_weights(file, config, number_format, _fetching(report), **placement)
    return model, tokenizer, None, spec, (*notices, _dequantised(file, number_format))


def _from_folder(name, source, admit, report, number_format, placement):
    """The same of a folder: a local one, an embedded model's, or the one that the hub's files come to."""
    if source == HUB:
        report(0.0, f"Asking the hub for {name}")
        on_hub = hub.find(name)
        folder = on_hub.config_folder()
    else:
        folder = embedded.folder(name, _fetching(report)) if source == EMBEDDED else Path(name)
    with _repairable(folder, source):
        config = checkpoint.read_config(folder)
        spec = admit(config)
        if source == HUB:
            folder = on_hub.folder(_fetching(report))
        report(FETCHED, f"Loading {name}")
        tokenizer = checkpoint.load_tokenizer(folder)
        image_processor = checkpoint.load_image_processor(folder) if spec.sees else None
        model = checkpoint.load_weights(folder, config, number_format, **placement)
    return model, tokenizer, image_processor, spec, (embedded.MODELS[name].notice,) if source == EMBEDDED else ()


def _fetching(report):
    """Progress of the part that fetches, as a share of the whole."""
    return lambda fraction, text: report(FETCHED * fraction, text)


def resolve(name: str) -> tuple[str, str]:
    """The cleaned name and its source. Raises `ModelNotFound` for what cannot be a model."""
    name = str(name or "").strip().strip("'\"").strip()
    if not name:
        raise ModelNotFound(f"No model is named; {ALLOWED}.")
    if name in embedded.MODELS:
        return name, EMBEDDED
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return path, FOLDER
    is_file = os.path.isfile(path)
    if is_file and path.lower().endswith(".gguf"):
        return path, GGUF
    if is_file or path.lower().endswith(".gguf"):
        raise ModelNotFound(f"{path!r} is not {'a .gguf file' if is_file else 'there'}; {ALLOWED}.")
    if address := re.fullmatch(r"(?:https?://)?([\w.-]+\.co)/(.*)|\w+://.*", name):
        return _hub_name(name, address[1], address[2]), HUB
    try:
        validate_repo_id(name)
    except HFValidationError:
        pass
    else:
        if "/" in name:
            return name, HUB
    raise ModelNotFound(f"{name!r} is no local folder or file, and no name of a hub model; {ALLOWED}.")


def _hub_name(address: str, host: str | None, path: str | None) -> str:
    parts = (path or "").split("?")[0].strip("/").split("/")
    if host not in HUB_HOSTS or len(parts) < 2 or parts[0] in ("datasets", "spaces"):
        raise ModelNotFound(f"The address {address!r} is not that of a model on huggingface.co; {ALLOWED}.")
    return "/".join(parts[:2])


@contextmanager
def _repairable(folder: Path, source: str):
    """A damaged file in our own cache has a remedy that one in the person's own folder has not."""
    try:
        yield
    except BrokenModel as error:
        if source != EMBEDDED:
            raise
        remedy = f"delete the folder {folder}, and it will be made anew"
        if folder.is_relative_to(embedded.BUNDLED):
            remedy = "restore it from the repository"
        raise BrokenModel(f"{str(error).rstrip('.')}; {remedy}.") from None


def _input_device(model: PreTrainedModel) -> torch.device:
    embedding = model.get_input_embeddings()
    if embedding.weight.is_meta:  # offloaded: its hook knows where it runs
        return torch.device(embedding._hf_hook.execution_device)
    return embedding.weight.device


def _limits(loaded: LoadedModel):
    """Notices about what this model cannot do, or does otherwise than expected."""
    if not loaded.tokenizer.chat_template:
        yield f"{loaded.name} has no chat template, so prompts go in as plain text for it to continue."
    if loaded.packed:
        yield "The weights are quantised in packed form, so what reads weights (channel pruning, fitting) is refused."
    if loaded.offloaded:
        yield "Some layers are offloaded and move to the device at every call, so times say little."


def _dequantised(file: GgufFile, number_format: torch.dtype) -> str:
    kinds = sorted({tensor.kind.name for tensor in file.tensors.values()})
    return (
        f"The weights of this GGUF file ({', '.join(kinds)}) were dequantised to {_short(number_format)}; "
        "memory and times are those of the unpacked model."
    )


def _short(number_format: torch.dtype) -> str:
    return str(number_format).removeprefix("torch.")
