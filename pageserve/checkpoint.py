"""What lies in a checkpoint's files, read from their headers alone: no weights and no torch.

A header says where each tensor starts and ends, so a truncated, foreign or damaged file is found
here, before a byte of weight is read.
"""

import functools
import json
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pageserve.utils import cdiv

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class ModelError(ValueError):
    """A model cannot be found, read or served; the message is one sentence a user can act on."""


class TensorInfo(NamedTuple):
    """One stored tensor: ``dtype`` in the file format's own word, ``shape`` row-major, ``offset``
    of its first byte in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path


class GGUFHeader(NamedTuple):
    """Key-value metadata (arrays as lists) and tensors by name, in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raise :class:`ModelError` if it holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def list_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a model directory or .gguf file by its stored name.

    Raises :class:`ModelError` for missing shards, tensors the index promises in vain, and damaged
    files.
    """
    if path.suffix == ".gguf":
        return read_gguf_header(path).tensors
    weight_map = _weight_map(path)
    files = list(dict.fromkeys(weight_map.values())) or [_single_file(path)]
    tensors = {info.name: info for file in files for info in _safetensors_header(path / file)}
    for name, file in weight_map.items():
        if name not in tensors:
            raise ModelError(f"{INDEX_FILE} promises tensor {name} in {file}, which lacks it")
    return tensors


# --- safetensors ----------------------------------------------------------------------------------


def _weight_map(path: Path) -> dict[str, str]:
    """Return tensor name → shard file of the index, empty for an unsharded checkpoint.

    A single file wins over an index beside it, as in transformers."""
    if (path / SINGLE_FILE).exists() or not (path / INDEX_FILE).exists():
        return {}
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path / INDEX_FILE} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{INDEX_FILE} places tensor {name} outside the model directory")
        if not (path / file).is_file():
            raise ModelError(f"shard {file} is missing from {path} (tensor {name})")
    return weight_map


def _single_file(path: Path) -> str:
    if (path / SINGLE_FILE).exists():
        return SINGLE_FILE
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{path} has several safetensors files but no {INDEX_FILE}")
    raise ModelError(f"{path} holds no safetensors weights (other formats are not read)")


def _safetensors_header(file: Path) -> list[TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ModelError(f"{file} is truncated: its header is incomplete")
        try:
            header = json.loads(stream.read(length))
            start = 8 + length
            tensors = [
                _safetensors_entry(name, entry, start, file)
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is not a safetensors file: {error!r}") from error
    for info in tensors:
        if info.offset + info.nbytes > size:
            raise ModelError(f"{file} is truncated: tensor {info.name} lies beyond its end")
    return tensors


def _safetensors_entry(name: str, entry: dict[str, Any], start: int, file: Path) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin, file)


# --- GGUF -----------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return metadata and tensor places of a .gguf file (version 2 or 3, little endian).

    Raises :class:`ModelError` for a file that is missing, truncated or of another format.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _read_gguf_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read_gguf_header(path: Path, size: int, mtime_ns: int) -> GGUFHeader:
    """Parse once per file state: tokenizer, configuration and weights all ask for it."""
    if size < 24:
        raise ModelError(f"{path} is truncated: it has no complete GGUF header")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _GGUFParser(data, path).parse()
        except struct.error as error:
            raise ModelError(f"{path} is truncated: its header is incomplete") from error
        except (UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{path} is damaged: {error!r} in its header") from error


class _GGUFParser:
    """A cursor over the bytes of one file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def parse(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self.offset = 4
        if (version := self.scalar("I")) not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; 2 and 3 can be read")
        num_tensors, num_entries = self.scalar("Q"), self.scalar("Q")
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(num_entries)}
        places = [self.place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = cdiv(self.offset, alignment) * alignment
        tensors = {place[0]: self.tensor(*place, start) for place in places}
        return GGUFHeader(metadata, tensors)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        begin = self.offset + 8
        self.offset = begin + self.scalar("Q")
        if self.offset > len(self.data):
            raise struct.error("string beyond the end")
        return self.data[begin : self.offset].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data) - self.offset:
            raise struct.error("array beyond the end")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        format = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(format, self.data, self.offset)
        self.offset += struct.calcsize(format)
        return list(values)

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, row-major shape, type number and offset in the data section."""
        name = self.string()
        dims = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q")

    def tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> TensorInfo:
        if kind not in GGMLQuantizationType._value2member_map_:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind}")
        block, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        count = 1
        for dim in shape:
            count *= dim
        info = TensorInfo(
            name,
            GGMLQuantizationType(kind).name,
            shape,
            start + offset,
            count * type_size // block,
            self.path,
        )
        if info.offset + info.nbytes > len(self.data):
            raise ModelError(f"{self.path} is truncated: tensor {name} lies beyond its end")
        return info
