"""A GGUF file: what it says of its model, and where its tensors lie. Reads every format that gguf names.

Why not GGUFReader of the package gguf: it takes seconds for a vocabulary of 49,152 words, which are not
looked at in most runs. The package still knows the formats' sizes, and dequantises.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GGUFFile", "GGUFTensor"]

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
           12: "<f8"}  # fmt: skip
TEXT, LIST = 8, 9
MOST_DIMS = 4

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as it lies in the file. shape: as numpy and torch say it, rows first.

    data: uint8 `[*shape[:-1], bytes of a row]`.
    """

    name: str
    format: str  # "Q4_1"
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def dequantized(self) -> Floats:
        """Its numbers, float32 `[*shape]`; ValueError for a format that gguf does not dequantise."""
        gguf = _gguf()
        try:
            values = gguf.dequantize(self.data, gguf.GGMLQuantizationType[self.format])
        except NotImplementedError:
            raise ValueError(f"tensor {self.name} is {self.format}, which cannot be dequantised") from None
        return np.array(values, dtype=np.float32).reshape(self.shape)  # a copy: the file is read only


class GGUFFile:
    """fields: what the file says of its model, by GGUF's keys; tensors: by GGUF's names.

    fingerprint: changes with the fields and the tensors' places (not with the numbers in them).

    Raises ValueError, in one sentence, for a file that is none, is cut off, or is of a newer kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        self._at = len(MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"{path} is GGUF of version {version}; only {VERSIONS} are supported")
        tensors, fields = self._number("<Q"), self._number("<Q")
        self.fields: dict[str, Any] = dict(self._field() for _ in range(fields))
        places = [self._place() for _ in range(tensors)]
        self.fingerprint = zlib.crc32(memoryview(self._bytes)[: self._at])
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        self.tensors: Mapping[str, GGUFTensor] = {each[0]: self._tensor(begin, *each) for each in places}

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._bytes):
            raise ValueError(f"{self.path} is cut off: it ends after {len(self._bytes)} bytes")
        return self._bytes[begin : self._at]

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", errors="replace")

    def _field(self) -> tuple[str, Any]:
        return self._text(), self._value(self._number("<I"))

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind in NUMBERS:
            return self._numbers(kind, 1)[0].item()
        if kind != LIST:
            raise ValueError(f"{self.path}: a field is of the unknown kind {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in NUMBERS:
            return self._numbers(inner, count).tolist()
        if inner != TEXT:  # lists of lists are allowed, and nobody writes them
            raise ValueError(f"{self.path}: a list holds the unknown kind {inner}")
        return [self._text() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, format and offset."""
        name, dims = self._text(), self._number("<I")
        if not 1 <= dims <= MOST_DIMS:
            raise ValueError(f"{self.path}: tensor {name} has {dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _tensor(self, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        gguf = _gguf()
        try:
            format = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{self.path}: tensor {name} is of the unknown format {kind}") from None
        block, size = gguf.GGML_QUANT_SIZES[format]
        if shape[-1] % block:
            raise ValueError(f"{self.path}: tensor {name} {list(shape)} is no whole blocks of {block}")
        row = shape[-1] // block * size
        rows = math.prod(shape[:-1])
        if begin + offset + rows * row > len(self._bytes):
            raise ValueError(f"{self.path} is cut off: tensor {name} lies behind its end")
        data = np.frombuffer(self._bytes, np.uint8, rows * row, begin + offset)
        return GGUFTensor(name, format.name, shape, data.reshape(*shape[:-1], row))


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("reading GGUF files needs the package gguf: pip install gguf") from error
    return gguf
