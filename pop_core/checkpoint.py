"""A folder in the format of the hub: its config first, then its weights, every tensor of them accounted for.

Only safetensors are read, and never a pickle; code that a folder brings along is never run.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from .errors import BrokenModel, ModelNotFound, NotEnoughMemory, PopError, UnsupportedModel, first_line
from .families import SEEING, check_layers, supported_families

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
TEMPLATE = "chat_template.json"
LAYER_COUNTS = ("num_hidden_layers", "depth")  # of text models, and of some vision towers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def read_config(folder: Path):
    """The config of the model in `folder`. Raises `ModelNotFound`, `BrokenModel` or `UnsupportedModel`."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"The folder {folder} has no config.json, so it is not a model.")
    entries = _read_json(file)
    kind = str(entries.get("model_type"))
    if kind not in CONFIG_MAPPING_NAMES:
        own_code = " and would need Python code of its own, which is never run" if "auto_map" in entries else ""
        raise UnsupportedModel(f"The architecture '{kind}' is unknown{own_code}; use one of {supported_families()}.")
    for part in (entries, entries.get("text_config"), entries.get("vision_config")):
        for name in LAYER_COUNTS:
            if isinstance(part, dict) and name in part:
                check_layers(part[name])
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the config classes raise about values of the wrong kind
        raise BrokenModel(f"{file} is not a usable config ({first_line(error)}).") from error


def check_files(folder: Path, quantised: bool) -> None:
    """Open every weight file, which checks its header against its length, and look at the tensors' number formats.

    Integers and 8-bit floats would be cast to a model full of noise. Raises `BrokenModel` naming file or tensor.
    """
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                formats = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
            if odd := [name for name, kind in formats.items() if kind not in FLOATS and not quantised]:
                raise BrokenModel(f"The tensor '{odd[0]}' in {file} is stored as {formats[odd[0]]}, not as floats.")
        except FileNotFoundError:
            raise BrokenModel(f"The weight file {file} is missing.") from None
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{file} is damaged or cut off ({first_line(error)}).") from None


def load_weights(folder: Path, config, dtype: torch.dtype, **placement):
    """The model in `folder`. Raises `BrokenModel` when a tensor is missing, unexpected or of the wrong shape."""
    check_files(folder, quantised=getattr(config, "quantization_config", None) is not None)
    with quiet(), clear_errors(folder):
        model, info = model_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that they are in `info` and not in a printed report
            output_loading_info=True,
            **placement,
        )
    check_tensors(folder, info)
    return model


def model_class(config):
    """The `transformers` class that makes the model of a config."""
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


def load_image_processor(folder: Path):
    """The image processor in `folder`, working with PIL. Raises `BrokenModel`."""
    try:
        with quiet():
            return AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # a missing file, a class that is unknown, values of the wrong kind
        raise BrokenModel(f"The image processor in {folder} cannot be read ({first_line(error)}).") from error


def load_tokenizer(folder: Path):
    """The tokenizer in `folder`, with its chat template. Raises `BrokenModel`."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make up an empty one
        raise BrokenModel(f"The folder {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizer classes, and the Rust behind them, raise whatever they like
        raise BrokenModel(f"The tokenizer in {folder} cannot be read ({first_line(error)}).") from error
    if not tokenizer.chat_template and (folder / TEMPLATE).is_file():  # older models that see keep it apart
        tokenizer.chat_template = _read_json(folder / TEMPLATE).get("chat_template")
    return tokenizer


def check_tensors(where, info: dict) -> None:
    """Hold transformers' loading report against the law: nothing missing, nothing left over, all shapes right."""
    for fault, entry in (
        ("lacks tensors", "missing_keys"),
        ("has tensors that the model does not know", "unexpected_keys"),
        ("has tensors of the wrong shape", "mismatched_keys"),
    ):
        if wrong := sorted(key if isinstance(key, str) else key[0] for key in info[entry]):
            raise BrokenModel(f"{where} {fault}: {', '.join(wrong[:3])} ({len(wrong)} in all).")
    if info.get("error_msgs"):
        raise BrokenModel(f"{where} cannot be loaded ({info['error_msgs'][0]}).")


@contextmanager
def clear_errors(where):
    """What can go wrong while `transformers` loads weights from `where`, in one sentence."""
    try:
        yield
    except PopError:
        raise
    except torch.OutOfMemoryError:
        raise NotEnoughMemory(f"The memory ran out while {where} was loaded.") from None
    except ImportError as error:  # a quantised checkpoint wants a package
        raise PopError(f"{where} needs a package that is not installed ({first_line(error)}).") from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise BrokenModel(f"{where} cannot be loaded ({first_line(error)}).") from error


@contextmanager
def quiet():
    """Without transformers' progress bars and warnings: what matters in them is raised or becomes a notice."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(_read_json(folder / INDEX)["weight_map"].values()))
            if any(Path(name).name != name for name in names):  # a shard lies beside its index and nowhere else
                raise BrokenModel(f"{folder / INDEX} names weight files outside its folder.")
            return [folder / name for name in names]
        except (KeyError, AttributeError, TypeError):
            raise BrokenModel(f"{folder / INDEX} has no 'weight_map' from tensors to files.") from None
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise BrokenModel(
            f"The weights in {folder} are pickles, which can run code and are not read; convert them to safetensors."
        )
    raise BrokenModel(f"The folder {folder} has no weights: neither {WEIGHTS} nor {INDEX} is there.")


def _read_json(file: Path) -> dict:
    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{file} is not valid JSON ({first_line(error)}).") from None
    if not isinstance(entries, dict):
        raise BrokenModel(f"{file} is not a JSON object.")
    return entries
