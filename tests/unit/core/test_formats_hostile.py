"""Every way a file can be bad is a typed error: nothing crashes, hangs, or gives other bytes."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmrpc
from mmrpc.errors import FileTooShortError, LayoutError, MmrpcError


def _safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _entry(start: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


_SAFETENSORS: dict[str, tuple[bytes, type[MmrpcError], str]] = {
    "empty file": (b"", FileTooShortError, "header length"),
    "length cut": (b"\1\0\0", FileTooShortError, "header length"),
    "header cut": (_safetensors(b"{", length=100), FileTooShortError, "the header"),
    "huge header": (_safetensors(b"{}", length=2**63), LayoutError, "header claims"),
    "no JSON": (_safetensors(b"{nonsense"), LayoutError, "no JSON"),
    "no object": (_safetensors(b"[1]"), LayoutError, "start with"),
    "bad UTF-8": (_safetensors(b'{"\xff": 1}'), LayoutError, "no JSON"),
    "deep JSON": (_safetensors(b'{"a":' + b"[" * 100_000), LayoutError, "no JSON"),
    "key twice": (
        _safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'),
        LayoutError,
        "twice",
    ),
    "entry is no dict": (_safetensors({"a": 1}), LayoutError, "not a dict"),
    "unknown field": (_safetensors({"a": _entry(0, 0) | {"x": 1}}), LayoutError, "not a dict"),
    "unknown dtype": (_safetensors({"a": _entry(0, 4, dtype="F9")}), LayoutError, "dtype 'F9'"),
    "dtype is a list": (_safetensors({"a": _entry(0, 4, dtype=["U8"])}), LayoutError, "dtype"),
    "negative size": (_safetensors({"a": _entry(0, 4, [-4])}), LayoutError, "shape"),
    "float size": (_safetensors({"a": _entry(0, 4, [4.0])}), LayoutError, "shape"),
    "true as size": (_safetensors({"a": _entry(0, 1, [True])}), LayoutError, "shape"),
    "size beyond 64 bits": (_safetensors({"a": _entry(0, 4, [2**70])}), LayoutError, "shape"),
    "product beyond 64 bits": (
        _safetensors({"a": _entry(0, 4, [2**40, 2**40])}),
        LayoutError,
        "needs",
    ),
    "negative offset": (_safetensors({"a": _entry(-1, 3, [4])}), LayoutError, "offsets"),
    "offsets crossed": (_safetensors({"a": _entry(4, 0, [4])}), LayoutError, "needs"),
    "three offsets": (
        _safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}),
        LayoutError,
        "offsets",
    ),
    "shape and offsets differ": (_safetensors({"a": _entry(0, 4, [5])}), LayoutError, "needs 5"),
    "overlap": (
        _safetensors({"a": _entry(0, 4), "b": _entry(2, 6)}, bytes(6)),
        LayoutError,
        "overlaps",
    ),
    "hole": (_safetensors({"a": _entry(0, 4), "b": _entry(6, 8)}, bytes(8)), LayoutError, "hole"),
    "data cut": (_safetensors({"a": _entry(0, 8)}, bytes(7)), FileTooShortError, "last tensor"),
    "bytes after": (_safetensors({"a": _entry(0, 8)}, bytes(9)), LayoutError, "follow"),
    "huge tensor": (_safetensors({"a": _entry(0, 2**62)}, b"x"), FileTooShortError, "last tensor"),
    "metadata no strings": (_safetensors({"__metadata__": {"a": 1}}), LayoutError, "metadata"),
}


@pytest.mark.parametrize("case", _SAFETENSORS)
def test_bad_safetensors(tmp_path: Path, case: str) -> None:
    """A malformed safetensors file says what is wrong with it."""
    raw, error, match = _SAFETENSORS[case]
    (tmp_path / "m.safetensors").write_bytes(raw)
    with pytest.raises(error, match=match):
        mmrpc.open(tmp_path / "m.safetensors")


def _npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    raw = header.encode("latin-1") if isinstance(header, str) else header
    form = "<H" if version[0] == 1 else "<I"
    return b"\x93NUMPY" + bytes(version) + struct.pack(form, len(raw)) + raw + data


def _header(descr: object = "<f4", shape: object = (1,), order: object = False) -> str:
    return repr({"descr": descr, "fortran_order": order, "shape": shape})


_NPY: dict[str, tuple[bytes, type[MmrpcError], str]] = {
    "empty file": (b"", FileTooShortError, "magic"),
    "magic cut": (b"\x93NUM", FileTooShortError, "magic"),
    "other magic": (b"\x94NUMPY\1\0", LayoutError, "does not start"),
    "unknown version": (_npy(_header(), version=(9, 0)), LayoutError, "version 9.0"),
    "length cut": (b"\x93NUMPY\1\0\1", FileTooShortError, "header length"),
    "header cut": (_npy(_header())[:-5], FileTooShortError, "the header"),
    "huge header": (
        b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1),
        LayoutError,
        "header claims",
    ),
    "no literal": (_npy("{'descr': open('x')}"), LayoutError, "cannot be parsed"),
    "no Python": (_npy("{'"), LayoutError, "cannot be parsed"),
    "deep": (_npy("[" * 9000), LayoutError, "cannot be parsed"),
    "a zero byte": (_npy("{'a': '\0'}"), LayoutError, "parsed|not a dict"),
    "no dict": (_npy("[1, 2]"), LayoutError, "not a dict"),
    "a key too many": (_npy("{'descr': '<f4', 'x': 1}"), LayoutError, "not a dict"),
    "order no bool": (_npy(_header(order="C")), LayoutError, "fortran_order"),
    "shape no tuple": (_npy(_header(shape=[1])), LayoutError, "shape"),
    "negative size": (_npy(_header(shape=(-1,)), bytes(4)), LayoutError, "shape"),
    "float size": (_npy(_header(shape=(1.0,)), bytes(4)), LayoutError, "shape"),
    "true as size": (_npy(_header(shape=(True,)), bytes(4)), LayoutError, "shape"),
    "size beyond 64 bits": (_npy(_header(shape=(2**70,)), bytes(4)), LayoutError, "larger"),
    "product beyond 64 bits": (_npy(_header(shape=(2**40, 2**40))), LayoutError, "larger"),
    "too many dims": (_npy(_header(shape=(1,) * 65), bytes(4)), LayoutError, "strides"),
    "empty dtype": (_npy(_header(descr="")), LayoutError, "dtype"),
    "nonsense dtype": (_npy(_header(descr="<f5")), LayoutError, "dtype"),
    "no byte order": (_npy(_header(descr="f4"), bytes(4)), LayoutError, "dtype"),
    "odd byte order": (_npy(_header(descr="!f4"), bytes(4)), LayoutError, "descr"),
    "dtype is a number": (_npy(_header(descr=4)), LayoutError, "structured"),
    "data cut": (_npy(_header(shape=(9,)) + " " * 4, bytes(35)), FileTooShortError, "array"),
}


@pytest.mark.parametrize("case", _NPY)
def test_bad_npy(tmp_path: Path, case: str) -> None:
    """A malformed .npy file says what is wrong with it."""
    raw, error, match = _NPY[case]
    (tmp_path / "a.npy").write_bytes(raw)
    with pytest.raises(error, match=match):
        mmrpc.open(tmp_path / "a.npy", copy_misaligned=True)


class _Pickled:
    """A pickle that names globals which need not exist here, as `torch.save` would write it."""

    def __init__(self) -> None:
        self.raw = b"\x80\x02"

    def tensor(
        self,
        *,
        count: int = 4,
        offset: int = 0,
        shape: tuple[int, ...] = (4,),
        strides: tuple[int, ...] = (1,),
        storage: bytes = b"FloatStorage",
    ) -> bytes:
        def number(n: int) -> bytes:
            return pickle.dumps(n, 2)[2:-1]

        def numbers(ns: tuple[int, ...]) -> bytes:
            return b"(" + b"".join(map(number, ns)) + b"t"

        pid = (
            b"(X\x07\0\0\0storagectorch\n"
            + storage
            + b"\nX\x01\0\0\x000X\x03\0\0\0cpu"
            + number(count)
            + b"tQ"
        )
        rest = number(offset) + numbers(shape) + numbers(strides) + b"\x89N"
        return self.raw + b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + rest + b"tR."


def _zip(pickled: bytes, data: bytes = bytes(16), **how: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/byteorder", b"little")
        archive.writestr("m/data/0", data)
    return out.getvalue()


def _changed(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert old in raw
    return raw.replace(old, new)


_GOOD = _zip(_Pickled().tensor())

_TORCH: dict[str, tuple[bytes, type[MmrpcError], str]] = {
    "empty file": (b"", LayoutError, "no whole zip"),
    "not a zip": (b"PK\3\4" + bytes(100), LayoutError, "no whole zip"),
    "cut at the end": (_GOOD[:-30], LayoutError, "no whole zip"),
    "cut in the middle": (_GOOD[: len(_GOOD) // 2], LayoutError, "no whole zip"),
    "compressed": (
        _zip(_Pickled().tensor(), compression=zipfile.ZIP_DEFLATED),
        LayoutError,
        "compressed",
    ),
    "big-endian": (_changed(_GOOD, b"little", b"big en"), LayoutError, "zip|big-endian"),
    "no pickle": (_changed(_GOOD, b"data.pkl", b"data.xxx"), LayoutError, "no data.pkl"),
    "no storage": (_changed(_GOOD, b"data/0", b"data/1"), LayoutError, "storage '0' is missing"),
    "storage too short": (_zip(_Pickled().tensor(), bytes(15)), LayoutError, "needs 16"),
    "storage of 2**62": (_zip(_Pickled().tensor(count=2**62)), LayoutError, "needs"),
    "negative count": (_zip(_Pickled().tensor(count=-1)), LayoutError, "needs"),
    "beyond its storage": (_zip(_Pickled().tensor(shape=(5,))), LayoutError, "beyond the end"),
    "offset beyond": (_zip(_Pickled().tensor(offset=1)), LayoutError, "beyond the end"),
    "negative offset": (_zip(_Pickled().tensor(offset=-1)), LayoutError, "shape"),
    "negative stride": (_zip(_Pickled().tensor(strides=(-1,))), LayoutError, "strides"),
    "strides beyond": (_zip(_Pickled().tensor(strides=(2,))), LayoutError, "beyond the end"),
    "shape without strides": (_zip(_Pickled().tensor(strides=())), LayoutError, "beyond|strict"),
    "huge shape": (
        _zip(_Pickled().tensor(shape=(2**40, 2**40), strides=(0, 0))),
        LayoutError,
        "larger",
    ),
    "unknown storage": (_zip(_Pickled().tensor(storage=b"Linear")), LayoutError, "torch.Linear"),
    "a call": (_zip(b"cos\nsystem\n(X\x04\0\0\0truetR."), LayoutError, "os.system"),
    "getattr": (_zip(b"cbuiltins\ngetattr\n."), LayoutError, "builtins.getattr"),
    "dotted name": (
        _zip(b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.path\x93."),
        LayoutError,
        "hub.os.path",
    ),
    "a set attribute": (
        _zip(b"ctorch._utils\n_rebuild_parameter\nN}X\x01\0\0\0aK\1s\x86b."),
        LayoutError,
        "damaged",
    ),
    "a huge memo index": (_zip(b"Kr\xff\xff\xff\xff0."), LayoutError, "damaged"),
    "a huge string": (_zip(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."), LayoutError, "damaged"),
    "no end": (_zip(b"\x80\x02K\1"), LayoutError, "damaged"),
    "empty pickle": (_zip(b""), LayoutError, "damaged"),
    "another storage id": (_zip(b"X\x01\0\0\x000Q."), LayoutError, "refers to '0'"),
}


@pytest.mark.parametrize("case", _TORCH)
def test_bad_torch_file(tmp_path: Path, case: str) -> None:
    """A malformed torch file says what is wrong with it, and runs nothing."""
    raw, error, match = _TORCH[case]
    (tmp_path / "m.pt").write_bytes(raw)
    with pytest.raises(error, match=match):
        mmrpc.open(tmp_path / "m.pt", copy_misaligned=True)


def test_the_torch_file_that_the_bad_ones_are_made_of_is_good(tmp_path: Path) -> None:
    """What the hostile files change is what makes them bad."""
    (tmp_path / "m.pt").write_bytes(_GOOD)
    assert mmrpc.open(tmp_path / "m.pt", copy_misaligned=True).tolist() == [0, 0, 0, 0]


class TestMisaligned:
    """Bytes that do not stand at a multiple of the element size."""

    def _write(self, path: Path) -> Path:
        header = json.dumps({"a": _entry(0, 1), "x": _entry(1, 9, [2], "F32")}).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        data = b"\0" + np.array([1.5, 2.5], dtype=np.float32).tobytes()
        path.write_bytes(_safetensors(header, data))
        return path

    def test_an_error_that_says_what_to_do(self, tmp_path: Path) -> None:
        """They are not read element by element behind the caller's back."""
        with pytest.raises(LayoutError, match="copy_misaligned=True"):
            mmrpc.open(self._write(tmp_path / "m.safetensors"))

    def test_a_copy_if_asked(self, tmp_path: Path) -> None:
        """The copy has the values, and travels as a mapped tensor does."""
        x = mmrpc.open(self._write(tmp_path / "m.safetensors"), "x", copy_misaligned=True)
        assert x.tolist() == [1.5, 2.5]
        assert pickle.loads(pickle.dumps(x)).tolist() == [1.5, 2.5]


def _good_files() -> dict[str, Callable[[Path], None]]:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.int16)}
    return {
        "m.safetensors": lambda path: safetensors.torch.save_file(tensors, path),
        "a.npy": lambda path: np.save(path, np.arange(12.0).reshape(3, 4)),
        "m.pt": lambda path: torch.save(tensors, path),
    }


@pytest.mark.parametrize("name", _good_files())
class TestDamage:
    def test_every_truncation_is_told(self, tmp_path: Path, name: str) -> None:
        """A file cut anywhere is an error: it never opens with fewer or other bytes."""
        _good_files()[name](tmp_path / name)
        raw = (tmp_path / name).read_bytes()
        for end in range(0, len(raw), 7):
            (tmp_path / f"cut-{name}").write_bytes(raw[:end])
            with pytest.raises((LayoutError, FileTooShortError)):
                mmrpc.open(tmp_path / f"cut-{name}")

    @settings(
        max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.data())
    def test_flipped_bytes_never_crash(
        self, tmp_path: Path, name: str, data: st.DataObject
    ) -> None:
        """A file with any bytes changed opens, or is a typed error."""
        _good_files()[name](tmp_path / name)
        raw = bytearray((tmp_path / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        (tmp_path / f"bad-{name}").write_bytes(raw)
        try:
            found = mmrpc.open(tmp_path / f"bad-{name}", copy_misaligned=True)
        except MmrpcError:
            return
        _read_all(found)


def _read_all(found: object) -> None:
    """Touches every byte: a mapping beyond the end of the file would be a SIGBUS."""
    if isinstance(found, torch.Tensor):
        bytes(torch.Tensor.clone(found).contiguous().view(-1).view(torch.uint8).tolist())
    elif isinstance(found, dict):
        for value in found.values():
            _read_all(value)
