"""Files that other programs wrote: safetensors, NumPy, torch, raw."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmrpc
from mmrpc import MemoryMappedTensor
from mmrpc.core.formats.npy import _KINDS
from mmrpc.core.formats.safetensors import _DTYPES
from mmrpc.core.formats.source import Source
from mmrpc.core.resolver import HostResolver, set_resolver
from mmrpc.errors import (
    ConfigError,
    LayoutError,
    NotRegularFileError,
    PathNotFoundError,
    StaleReferenceError,
)


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes of a dtype; booleans are 0 or 1."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = dtype.itemsize * int(np.prod(shape))
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return torch.Tensor.clone(t).contiguous().reshape(-1).view(torch.uint8)

    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


class TestSafetensors:
    @pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
    def test_every_dtype_comes_back(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """A tensor of each dtype of the format has the bytes that the library wrote."""
        x = _values(dtype, 4, 6)
        try:
            safetensors.torch.save_file({"x": x}, tmp_path / "m.safetensors")
        except KeyError:
            pytest.skip("this safetensors cannot write it")
        assert _same_bytes(mmrpc.open(tmp_path / "m.safetensors", "x"), x)

    def test_all_keys_or_one(self, tmp_path: Path) -> None:
        """Without a key all tensors come, by name; with one, that tensor."""
        saved = {"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(3), "e": torch.zeros(0, 4)}
        safetensors.torch.save_file(saved, tmp_path / "m.safetensors", metadata={"by": "me"})
        found = mmrpc.open(tmp_path / "m.safetensors")
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[k], saved[k]) for k in saved)
        assert all(type(x) is MemoryMappedTensor for x in found.values())
        assert torch.equal(mmrpc.open(tmp_path / "m.safetensors", "a.w"), saved["a.w"])
        with pytest.raises(LayoutError, match=r"it has a\.w, b, e"):
            mmrpc.open(tmp_path / "m.safetensors", "c")

    def test_one_mapping_for_all(self, tmp_path: Path) -> None:
        """However many tensors a file has, it is mapped once and keeps no descriptor."""
        saved = {f"t{i}": torch.full((8,), float(i)) for i in range(300)}
        safetensors.torch.save_file(saved, tmp_path / "m.safetensors")
        before = len(os.listdir("/proc/self/fd"))
        found = mmrpc.open(tmp_path / "m.safetensors")
        assert len(os.listdir("/proc/self/fd")) == before
        maps = Path("/proc/self/maps").read_text()
        assert maps.count(str(tmp_path / "m.safetensors")) == 1
        assert found["t299"].sum() == 8 * 299

    def test_link_of_a_cache_is_followed(self, tmp_path: Path) -> None:
        """A link to a blob without a telling name, as Hugging Face's caches have, opens."""
        blob, link = tmp_path / "blobs" / "0a1b2c", tmp_path / "snapshots" / "m.safetensors"
        blob.parent.mkdir()
        link.parent.mkdir()
        safetensors.torch.save_file({"x": torch.arange(3.0)}, blob)
        link.symlink_to(blob)
        for path in (link, blob):
            x = mmrpc.open(path, "x")
            assert x.tolist() == [0, 1, 2]
            assert x.filename == str(blob)


class TestNumpy:
    @pytest.mark.parametrize("kind", _KINDS)
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_every_dtype_in_both_orders(self, tmp_path: Path, kind: str, order: str) -> None:
        """An array has the values that NumPy wrote, in C and Fortran order."""
        raw = _values(_KINDS[kind], 3, 4, 2)
        a = np.asarray(raw.numpy(), order=order)  # type: ignore[call-overload]
        np.save(tmp_path / "a.npy", a)
        x = mmrpc.open(tmp_path / "a.npy")
        assert _same_bytes(x, raw)
        assert x.stride() == tuple(s // a.itemsize for s in a.strides)

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        shape=st.lists(st.integers(0, 5), max_size=5),
        fortran=st.booleans(),
        version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    )
    def test_any_shape(
        self, tmp_path: Path, shape: list[int], fortran: bool, version: tuple[int, int]
    ) -> None:
        """Every shape, zero sizes and 0-d among them, in every version of the format."""
        a = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        a = np.asfortranarray(a) if fortran else a
        with open(tmp_path / "a.npy", "wb") as file:
            np.lib.format.write_array(file, a, version=version)
        x = mmrpc.open(tmp_path / "a.npy")
        assert tuple(x.shape) == a.shape
        assert torch.equal(torch.Tensor.clone(x), torch.from_numpy(a.copy()))

    @pytest.mark.parametrize(
        ("array", "match"),
        [
            (np.arange(3, dtype=">i4"), "big-endian"),
            (np.array(["a", "bc"]), "no dtype for NumPy's '<U2'"),
            (np.zeros(2, dtype=[("a", "f4")]), "structured"),
            (np.array([{"x": 1}], dtype=object), "pickled"),
            (np.array(["2020-01-01"], dtype="datetime64[D]"), "no dtype"),
            (np.zeros(2, dtype=np.longdouble), "no dtype"),
        ],
    )
    def test_what_torch_has_not(self, tmp_path: Path, array: np.ndarray, match: str) -> None:
        """An array that no tensor can be says why, and nothing in it is unpickled."""
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(LayoutError, match=match):
            mmrpc.open(tmp_path / "a.npy")

    def test_one_byte_elements_have_no_order(self, tmp_path: Path) -> None:
        """A big-endian mark on bytes means nothing."""
        np.save(tmp_path / "a.npy", np.arange(3, dtype=">u1"))
        assert mmrpc.open(tmp_path / "a.npy").tolist() == [0, 1, 2]


class TestTorch:
    def test_what_was_saved_comes_back_mapped(self, tmp_path: Path) -> None:
        """Containers, numbers, views and shared storages are as torch.load gives them."""
        x = torch.arange(10.0)
        saved = {
            "model": torch.nn.Linear(3, 2).state_dict(),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "views": [x, x.view(2, 5).t(), x[3:7]],
            "conj": torch.conj(torch.tensor([1 + 2j])),
            "imag": torch.tensor([1 + 2j]).conj().imag,
            "unsigned": torch.tensor([1, 2], dtype=torch.uint16),
            "scalar": torch.tensor(3),
            "empty": torch.zeros(0, 2),
            "plain": (1, "two", 3.0, None, True, torch.float16, torch.Size([1])),
        }
        torch.save(saved, tmp_path / "m.pt")
        found = mmrpc.open(tmp_path / "m.pt")
        wanted = torch.load(tmp_path / "m.pt", weights_only=True)
        assert isinstance(found["model"], OrderedDict)
        assert found["plain"] == wanted["plain"]
        for a, b in zip(_tensors(found), _tensors(wanted), strict=True):
            assert type(a) is MemoryMappedTensor
            assert a.stride() == b.stride() or not a.numel()
            assert torch.equal(torch.Tensor.clone(a), b.detach())

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint64],
        ids=str,
    )
    def test_dtypes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Both ways in which torch writes a tensor's dtype are read."""
        x = _values(dtype, 3, 5)
        torch.save(x, tmp_path / "x.pth")
        assert _same_bytes(mmrpc.open(tmp_path / "x.pth"), x)

    def test_a_key_may_lead_into_dicts(self, tmp_path: Path) -> None:
        """A dotted key finds a tensor of a nested dict; a wrong one names what there is."""
        torch.save(
            {"state": {"w": torch.ones(2), "a.b": torch.zeros(1)}, "n": 1}, tmp_path / "m.pt"
        )
        assert mmrpc.open(tmp_path / "m.pt", "state.w").tolist() == [1, 1]
        with pytest.raises(LayoutError, match="it has n, state"):
            mmrpc.open(tmp_path / "m.pt", "state.x")

    def test_no_code_is_run(self, tmp_path: Path) -> None:
        """A pickle that would call something is refused before it does."""

        class Evil:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(tmp_path / "made"),)

        torch.save({"x": torch.ones(1), "evil": Evil()}, tmp_path / "m.pt")
        with pytest.raises(LayoutError, match=r"it needs posix\.mkdir"):
            mmrpc.open(tmp_path / "m.pt")
        assert not (tmp_path / "made").exists()

    def test_a_whole_module_is_refused_with_a_hint(self, tmp_path: Path) -> None:
        """A pickled module is code; the error says to save its state_dict."""
        torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
        with pytest.raises(LayoutError, match="Save a state_dict"):
            mmrpc.open(tmp_path / "m.pt")

    def test_the_old_format_is_named(self, tmp_path: Path) -> None:
        """A file of torch's format before zip files says what to do."""
        torch.save(torch.ones(2), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(LayoutError, match="old format"):
            mmrpc.open(tmp_path / "m.pt")


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def test_an_arena(tmp_path: Path) -> None:
    """The arena of a tree opens as one, or one tensor of it."""
    tree = {"a": torch.arange(3), "sub": {"b": torch.ones(2)}}
    mmrpc.save_tree(tmp_path / "t", tree, arena=True)
    found = mmrpc.open(tmp_path / "t" / "tree.arena")
    assert found["a"].tolist() == [0, 1, 2]
    assert mmrpc.open(tmp_path / "t" / "tree.arena", "sub.b").tolist() == [1, 1]
    with pytest.raises(LayoutError, match="it has a, sub"):
        mmrpc.open(tmp_path / "t" / "tree.arena", "sub.c")


class TestRaw:
    def test_dtype_and_shape_make_it_a_tensor(self, tmp_path: Path) -> None:
        """A file of elements alone is mapped as the caller says, from an offset if asked."""
        (tmp_path / "x.bin").write_bytes(b"head" + np.arange(6, dtype=np.int32).tobytes())
        x = mmrpc.open(tmp_path / "x.bin", dtype=torch.int32, shape=(2, 3), offset=4)
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize(
        "arguments",
        [{"dtype": torch.int8}, {"shape": (1,)}, {"offset": 4}],
    )
    def test_half_of_it_is_not_enough(self, tmp_path: Path, arguments: dict[str, object]) -> None:
        """Dtype, shape and offset go together."""
        (tmp_path / "x.bin").write_bytes(bytes(8))
        with pytest.raises(LayoutError):
            mmrpc.open(tmp_path / "x.bin", **arguments)  # type: ignore[arg-type]

    def test_an_unknown_format_says_how(self, tmp_path: Path) -> None:
        """A file of no known format is not guessed at."""
        (tmp_path / "x.dat").write_bytes(bytes(100))
        with pytest.raises(LayoutError, match=r"mmrpc\.open\(path, dtype=\.\.\., shape="):
            mmrpc.open(tmp_path / "x.dat")


class TestModes:
    def test_by_default_the_file_is_not_changed(self, tmp_path: Path) -> None:
        """Writes to what somebody else's file holds stay in this process."""
        np.save(tmp_path / "a.npy", np.zeros(3))
        x = mmrpc.open(tmp_path / "a.npy")
        x[0] = 1
        assert np.load(tmp_path / "a.npy").tolist() == [0, 0, 0]

    def test_shared_if_asked(self, tmp_path: Path) -> None:
        """With "r+" writes reach the file."""
        np.save(tmp_path / "a.npy", np.zeros(3))
        x = mmrpc.open(tmp_path / "a.npy", mode="r+")
        x[0] = 1
        x.flush()
        assert np.load(tmp_path / "a.npy").tolist() == [1, 0, 0]

    def test_another_mode_is_refused(self, tmp_path: Path) -> None:
        """There are two modes."""
        np.save(tmp_path / "a.npy", np.zeros(3))
        with pytest.raises(LayoutError, match="mode"):
            mmrpc.open(tmp_path / "a.npy", mode="w")


class TestReferences:
    def test_a_piece_of_a_file_travels(self, tmp_path: Path) -> None:
        """A tensor of a file pickles as a short reference, and opens as the same bytes."""
        big = torch.randn(1000, 100)
        safetensors.torch.save_file({"pad": torch.ones(3), "x": big}, tmp_path / "m.safetensors")
        x = mmrpc.open(tmp_path / "m.safetensors", "x")
        data = pickle.dumps(x[10:20, ::2])
        assert len(data) < 400
        assert torch.equal(pickle.loads(data), big[10:20, ::2])

    def test_a_replaced_file_is_stale(self, tmp_path: Path) -> None:
        """A reference to a file that was replaced since is an error, never other bytes."""
        np.save(tmp_path / "a.npy", np.zeros(3))
        ref = mmrpc.open(tmp_path / "a.npy").ref()
        np.save(tmp_path / "b.npy", np.ones(3))
        os.replace(tmp_path / "b.npy", tmp_path / "a.npy")
        with pytest.raises(StaleReferenceError):
            ref.open()


class TestUrls:
    def test_without_mounts_a_url_says_what_is_missing(self) -> None:
        """A URL needs a cluster's mounts."""
        with pytest.raises(ConfigError, match=r"knows no mounts\. Pass cluster="):
            mmrpc.open("s3://bucket/x.npy")

    def test_the_resolver_in_use_is_asked(self, tmp_path: Path) -> None:
        """A resolver that knows mounts gives the local copy."""
        np.save(tmp_path / "a.npy", np.arange(3))

        class Mounts(HostResolver):
            def local_copy(self, url: str) -> str:
                assert url == "s3://bucket/a.npy"
                return str(tmp_path / "a.npy")

        before = set_resolver(Mounts())
        try:
            assert mmrpc.open("s3://bucket/a.npy").tolist() == [0, 1, 2]
        finally:
            set_resolver(before)


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors", "x.pt", "x"])
class TestPaths:
    def test_missing(self, tmp_path: Path, name: str) -> None:
        """A missing file is not made."""
        with pytest.raises(PathNotFoundError):
            mmrpc.open(tmp_path / name)
        assert not os.listdir(tmp_path)

    def test_not_a_file(self, tmp_path: Path, name: str) -> None:
        """A directory or a FIFO is refused at once."""
        (tmp_path / name).mkdir()
        with pytest.raises(NotRegularFileError):
            mmrpc.open(tmp_path / name)
        os.rmdir(tmp_path / name)
        os.mkfifo(tmp_path / name)
        with pytest.raises(NotRegularFileError):
            mmrpc.open(tmp_path / name)


def test_one_tensor_of_many_is_mapped_alone_and_the_header_is_checked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of thousands of tensors costs no more than the one that is wanted."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(
        {name: torch.full((2,), float(i)) for i, name in enumerate("abc")}, path
    )
    made: list[str] = []
    tensor = Source.tensor

    def noted(self: Source, layout: Any, what: str) -> Any:
        made.append(what)
        return tensor(self, layout, what)

    monkeypatch.setattr(Source, "tensor", noted)
    assert mmrpc.open(path, "b").tolist() == [1.0, 1.0]
    assert made == ["tensor 'b'"]
    with pytest.raises(LayoutError, match="it has a, b, c"):
        mmrpc.open(path, "d")
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(LayoutError, match="4 bytes follow"):
        mmrpc.open(path, "b")
