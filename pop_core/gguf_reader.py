"""Reading a GGUF file: its metadata, its table of tensors, and one tensor at a time as float32.

The `gguf` package unpacks the weights; its `GGUFReader` is not used, because it counts through a damaged array length
without end, and turns every vocabulary entry into numpy arrays (15 s for Gemma's 262,144 tokens, here one second).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from .errors import BrokenModel, ModelNotFound

ALIGNMENT = 32  # bytes, where the metadata has no general.alignment
MAX_DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """One entry of the table. `shape` in torch's order; `start` and `nbytes` say where it lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file: everything but the weights, which `read` fetches one by one."""

    path: Path
    metadata: dict
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantised(self) -> bool:
        """Whether any tensor is stored in blocks rather than as plain numbers."""
        plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
        return any(tensor.kind not in plain for tensor in self.tensors.values())

    def get(self, key: str, default=None):
        """The metadata entry `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32. Raises `BrokenModel` for a format that cannot be unpacked."""
        tensor = self.tensors[name]
        try:
            raw = np.memmap(self.path, np.uint8, mode="r", offset=tensor.start, shape=(tensor.nbytes,))
            packed = raw.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))
            numbers = dequantize(packed, tensor.kind).reshape(tensor.shape).astype(np.float32, copy=False)
            # what is stored as float32 would otherwise stay a read-only view of the file
            return numbers if numbers.flags.writeable else numbers.copy()
        except (NotImplementedError, ValueError, OSError) as error:
            raise BrokenModel(f"{self.path}: the tensor '{name}' cannot be unpacked ({error}).") from None


def read_gguf(path) -> GgufFile:
    """The header of the file at `path`. Raises `ModelNotFound`, or `BrokenModel` naming the file and the fault."""
    path = Path(path)
    if not path.is_file():
        raise ModelNotFound(f"There is no file {path}.")
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except (struct.error, ValueError, KeyError, TypeError, ArithmeticError, MemoryError, OSError) as error:
        raise BrokenModel(f"{path} is not a whole GGUF file ({error}); download it again.") from None


class _Cursor:
    """A place in the file that moves on with every value read."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def numbers(self, code: str, count: int = 1) -> tuple:
        size = struct.calcsize("<" + code) * count
        if size > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int):
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind])[0]
        (kind,), (count,) = self.numbers("I"), self.numbers("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        if kind != STRING:
            raise ValueError(f"its metadata has an array of the unknown type {kind}")
        return [self.text() for _ in range(count)]


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    cursor.at = 4
    (version,), (count, entries) = cursor.numbers("I"), cursor.numbers("Q", 2)
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; 2 and 3 can be read")
    metadata = {}
    for _ in range(entries):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    table = [_table_row(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in table:
        block, size = GGML_QUANT_SIZES[kind]
        nbytes = prod(shape) // block * size
        if data_start + offset + nbytes > len(cursor.data):
            raise ValueError(f"it ends inside the tensor '{name}'")
        if name in tensors:
            raise ValueError(f"it has the tensor '{name}' twice")
        tensors[name] = Tensor(name, shape, kind, data_start + offset, nbytes)
    return GgufFile(path, metadata, tensors)


def _table_row(cursor: _Cursor) -> tuple:
    name = cursor.text()
    (dimensions,) = cursor.numbers("I")
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"the tensor '{name}' has {dimensions} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    (kind,), (offset,) = cursor.numbers("I"), cursor.numbers("Q")
    return name, shape, GGMLQuantizationType(kind), offset
