"""What `torch.save` writes: a zip file with a pickle, and each storage as an uncompressed entry.

The pickle is read by an unpickler that knows tensors, their containers and plain values, and
refuses every other name: no code in the file is run. The storages are mapped where they are.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from mmrpc.core.layout import DTYPES, Layout
from mmrpc.errors import MmrpcError

if TYPE_CHECKING:
    from mmrpc.core.formats.source import Source

MAGIC: Final = b"PK\x03\x04"

_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")  # of the zip format, before name and extra field
_MAX_PICKLE_BYTES: Final = 1 << 30
_ENCRYPTED: Final = 0x1

# Names of storage classes, as the pickle has them.
_STORAGES: Final[dict[str, torch.dtype]] = {
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class _StorageType(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    """A storage in the file.

    Attributes:
        start: Of its first byte in the file.
        nbytes: Its length.
        dtype: Of its elements.
    """

    start: int
    nbytes: int
    dtype: torch.dtype


def read(source: Source) -> Any:
    """Gives what was saved, with mapped tensors in it.

    Raises:
        LayoutError: If it is no zip file of `torch.save`, is damaged, or holds anything but
            tensors, dicts, lists, tuples, numbers and strings.
        FileTooShortError: If a tensor reaches beyond the end of its storage's entry.
    """
    if source.size_bytes and source.read(0, 1, "its first byte") == b"\x80":
        raise source.bad(
            "it is in torch's old format, whose storages cannot be mapped",
            "Save it again with torch.save.",
        )
    try:
        with os.fdopen(os.dup(source.fd), "rb") as file, zipfile.ZipFile(file) as archive:
            entries = _entries(source, archive)
            pickled = _pickle_of(source, archive, entries)
    except MmrpcError:
        raise
    except Exception as error:  # a damaged zip file can raise anything
        raise source.bad(f"it is no whole zip file: {error}", "Was it truncated?") from None
    try:
        return _Unpickler(pickled, source, entries).load()
    except MmrpcError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise source.bad(f"its pickle is damaged: {error}") from None


def _entries(source: Source, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The entries by their names without the archive's top directory."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        _, separator, name = info.filename.partition("/")
        if not separator or name in found:
            raise source.bad(f"its entry {info.filename!r} is none that torch.save writes")
        found[name] = info
    return found


def _pickle_of(
    source: Source, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]
) -> bytes:
    if "data.pkl" not in entries:
        hint = "Load a TorchScript file with torch.jit.load." if "code" in str(entries) else None
        raise source.bad("it has no data.pkl, so torch.save did not write it", hint)
    if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise source.bad("its data.pkl is too large")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise source.bad("its elements are big-endian, and this machine is not")
    return archive.read(entries["data.pkl"])


def _data_start(source: Source, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an uncompressed entry start, from its local header."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
        raise source.bad(
            f"its entry {info.filename!r} is compressed or encrypted, and so cannot be mapped",
            "Save it again with torch.save.",
        )
    raw = source.read(info.header_offset, _LOCAL_HEADER.size, f"the header of {info.filename!r}")
    magic, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(raw)
    if magic != MAGIC:
        raise source.bad(f"its entry {info.filename!r} has no header at {info.header_offset:,}")
    return int(info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


# The C unpickler makes room for whatever memo index a file names; this one keeps a dict.
class _Unpickler(pickle._Unpickler):
    """Unpickles tensors and plain values, and refuses everything else.

    What a name of the pickle gives is immutable or a bound method, so that the pickle cannot
    change it for others.
    """

    def __init__(self, pickled: bytes, source: Source, entries: dict[str, zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._source = source
        self._entries = entries
        self._known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): torch.Size,
            ("torch", "Tensor"): "Tensor",
            ("torch.nn.parameter", "Parameter"): "Parameter",
            ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Gives one of the few things that a name may mean."""
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise self._source.bad(
            f"it needs {module}.{name}, which is no tensor, container or number",
            "Save a state_dict: dicts and lists of tensors, numbers and strings.",
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """Finds a storage in the file."""
        bad = self._source.bad
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise bad(f"its pickle refers to {pid!r:.80}")
        _, kind, key, _device, count = pid
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or type(count) is not int:
            raise bad(f"its pickle refers to {pid!r:.80}")
        info = self._entries.get(f"data/{key}")
        if info is None:
            raise bad(f"its storage {key!r} is missing")
        start, nbytes = _data_start(self._source, info), count * kind.dtype.itemsize
        if not 0 <= nbytes <= info.file_size:
            raise bad(f"its storage {key!r} has {info.file_size:,} bytes and needs {nbytes:,}")
        self._source.check_end(start + nbytes, f"storage {key!r}")
        return _Storage(start, nbytes, kind.dtype)

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        metadata: Any = None,
    ) -> torch.Tensor:
        if not isinstance(storage, _Storage):
            raise self._source.bad("a tensor in it has no storage")
        return self._map(storage, storage.dtype, offset, shape, strides, metadata)

    def _tensor_of_dtype(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> torch.Tensor:
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise self._source.bad("a tensor in it has no storage or no dtype")
        return self._map(storage, dtype, offset, shape, strides, metadata)

    def _map(
        self,
        storage: _Storage,
        dtype: torch.dtype,
        offset: Any,
        shape: Any,
        strides: Any,
        metadata: Any,
    ) -> torch.Tensor:
        source = self._source
        if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *shape, *strides)):
            raise source.bad(f"a tensor in it has the shape {shape!r} and strides {strides!r}")
        bits = metadata or {}
        layout = Layout(
            dtype,
            tuple(shape),
            tuple(strides),
            storage.start + offset * dtype.itemsize,
            bool(bits.get("conj")),
            bool(bits.get("neg")),
        )
        if len(shape) != len(strides) or layout.end_bytes > storage.start + storage.nbytes:
            raise source.bad(
                f"a tensor of shape {tuple(shape)} reaches beyond the end of its storage"
            )
        return source.tensor(layout, f"the tensor of shape {tuple(shape)}")

    def _parameter(self, data: Any, requires_grad: Any, hooks: Any) -> Any:
        """A parameter's tensor: what is mapped cannot require gradients."""
        return data

    def _from_type(self, rebuild: Any, cls: Any, args: Any, state: Any) -> Any:
        """A tensor with attributes, without them: they are no part of its values."""
        return rebuild(*args)
