"""Arenas: many tensors in one file, sent as one reference."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmrpc
from mmrpc import MemoryMappedTensor
from mmrpc.core.trees import arena as arenas
from mmrpc.core.trees.arena import Tree
from mmrpc.core.trees.table import HEADER_BYTES, Header, Table, digest_of
from mmrpc.errors import (
    FileTooShortError,
    LayoutError,
    MmrpcError,
    NoSpaceError,
    PathExistsError,
    PathNotFoundError,
    StaleReferenceError,
)
from tests.unit.core.trees.test_trees import example, same


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(tree, Tree)
    return tree.to_dict()


@pytest.fixture
def saved(tmp_path: Path) -> Tree:
    tree = mmrpc.save_tree(tmp_path / "t", example(), arena=True)
    assert isinstance(tree, Tree)
    return tree


class TestTree:
    def test_a_tree_comes_back(self, tmp_path: Path, saved: Tree) -> None:
        """What was saved is there, at once and after loading."""
        assert same(saved.to_dict(), saved.to_dict())
        tree = example() | {"sub": saved["sub"].to_dict()}
        assert same(saved.to_dict(), tree)
        assert same(_plain(mmrpc.load_tree(tmp_path / "t")), tree)
        assert os.listdir(tmp_path / "t") == ["tree.arena"]

    def test_it_is_a_mapping(self, saved: Tree) -> None:
        """It has keys, length, membership and subtrees, as a dict does."""
        assert list(saved) == list(example())
        assert len(saved) == len(example())
        assert "a" in saved
        assert "z" not in saved
        assert saved.get("z") is None
        assert isinstance(saved["sub"]["deep"], Tree)
        with pytest.raises(KeyError):
            saved["z"]

    def test_leaves_are_mapped_tensors(self, saved: Tree) -> None:
        """Each leaf has the class and the file, and writes reach all who map it."""
        x = saved["a"]
        assert type(x) is MemoryMappedTensor
        assert x.filename == saved.filename
        x[0, 0] = 77
        assert saved["a"][0, 0] == 77
        assert x.data_ptr() % 64 == 0

    def test_a_module_loads_it(self, tmp_path: Path) -> None:
        """A saved state_dict goes into load_state_dict as it is."""
        model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        tree = mmrpc.save_tree(tmp_path / "t", model.state_dict(), arena=True)
        other.load_state_dict(tree)
        assert torch.equal(other.weight, model.weight)

    def test_copies(self, saved: Tree) -> None:
        """copy shares the arena; deepcopy gives independent tensors."""
        deep = copy.deepcopy(saved)
        copy.copy(saved)["a"][0, 0] = 5
        assert saved["a"][0, 0] == 5
        assert deep["a"][0, 0] == 0

    def test_repr_names_the_file(self, saved: Tree) -> None:
        """It says how much there is and where."""
        assert repr(saved).startswith("Tree(10 entries, ")
        assert saved.filename in repr(saved)

    def test_modes(self, tmp_path: Path, saved: Tree) -> None:
        """With "r" writes stay here, and the tree is then not sent without them."""
        private = mmrpc.load_tree(tmp_path / "t", mode="r")
        private["a"][0, 0] = 9
        assert saved["a"][0, 0] == 0
        with pytest.raises(mmrpc.errors.NotSharedError, match="written to"):
            pickle.dumps(private)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.tuples(
                st.sampled_from([torch.uint8, torch.float32, torch.complex128, torch.bool]),
                st.lists(st.integers(0, 4), max_size=4),
            ),
            max_size=12,
        )
    )
    def test_any_tensors(self, kinds: list[tuple[torch.dtype, list[int]]]) -> None:
        """Tensors of any dtype and shape stand side by side, in shared memory too."""
        tree = {f"t{i}": torch.ones(s, dtype=dtype) * i for i, (dtype, s) in enumerate(kinds)}
        saved = mmrpc.save_tree(None, tree, arena=True)
        assert same(_plain(pickle.loads(pickle.dumps(saved))), tree)

    def test_sources_that_are_no_plain_rows(self) -> None:
        """Transposed, expanded, conjugated and large sources have their values."""
        tree = {
            "t": torch.arange(6.0).view(2, 3).t(),
            "e": torch.ones(1, 3).expand(4, 3),
            "c": torch.tensor([1 + 2j]).conj(),
            "large": torch.randn(400, 300),
            "after": torch.arange(3),
            "large t": torch.randn(400, 300).t(),
        }
        assert same(_plain(mmrpc.save_tree(None, tree, arena=True)), tree)


class TestReference:
    def test_its_size_does_not_grow(self, tmp_path: Path) -> None:
        """A tree of 5,000 tensors, or a subtree, pickles into as many bytes as one of two."""
        few = mmrpc.save_tree(tmp_path / "few_", {"a": torch.ones(2)}, arena=True)
        tree = {"m": {f"layer.{i}": torch.full((3,), float(i)) for i in range(5000)}}
        many = mmrpc.save_tree(tmp_path / "many", tree, arena=True)
        sizes = [len(pickle.dumps(t)) for t in (few, many, many["m"])]
        assert max(sizes) - min(sizes) < 32
        assert max(sizes) < 400
        assert pickle.loads(pickle.dumps(many["m"]))["layer.4999"].tolist() == [4999] * 3

    def test_the_table_is_kept(self, saved: Tree) -> None:
        """Who has read the table once does not read it again."""
        first, second = (pickle.loads(pickle.dumps(saved)) for _ in range(2))
        assert first._table is second._table is saved._table

    def test_another_process(self, saved: Tree) -> None:
        """A process that never saw the file opens the tree by its reference."""
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            total = pool.apply_async(_sum, (saved["sub"],)).get(timeout=60)
        assert total == float(saved["sub"]["b"].float().sum())

    def test_shared_memory_without_a_name(self) -> None:
        """With directory None the tree is in memory, and another process can open it."""
        tree = mmrpc.save_tree(None, {"b": torch.arange(4.0)}, arena=True)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            assert pool.apply_async(_sum, (tree,)).get(timeout=60) == 6
        with pytest.raises(LayoutError, match="a directory is needed"):
            mmrpc.save_tree(None, {"b": torch.arange(4.0)})

    def test_a_replaced_arena_is_stale(self, tmp_path: Path, saved: Tree) -> None:
        """A reference to an arena that was replaced is an error; its old map lives on."""
        data = pickle.dumps(saved)
        new = mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(1)}, arena=True, existsok=True)
        with pytest.raises(StaleReferenceError):
            pickle.loads(data)
        assert saved["a"].sum() == 15
        assert new["a"].tolist() == [1]

    def test_few_mappings_and_no_descriptors(self, tmp_path: Path) -> None:
        """Ten thousand tensors open without a descriptor and with one mapping."""
        tree = {f"t{i}": torch.zeros(1) for i in range(10_000)}
        mmrpc.save_tree(tmp_path / "t", tree, arena=True)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        loaded = _plain(mmrpc.load_tree(tmp_path / "t"))
        assert len(loaded) == 10_000
        assert len(os.listdir("/proc/self/fd")) == before
        assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1


def _sum(tree: Tree) -> float:
    return float(tree["b"].float().sum())


class TestSaving:
    def test_an_existing_arena_is_kept(self, tmp_path: Path, saved: Tree) -> None:
        """It is replaced only if asked."""
        with pytest.raises(PathExistsError):
            mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(1)}, arena=True)

    @pytest.mark.parametrize("arena", [True, False])
    def test_one_tree_in_a_directory(self, tmp_path: Path, arena: bool) -> None:
        """The two layouts do not share a directory: which one would load?"""
        mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(1)}, arena=arena)
        with pytest.raises(PathExistsError, match="other kind"):
            mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(1)}, arena=not arena, existsok=True)
        other = "meta.json" if arena else "tree.arena"
        (tmp_path / "t" / other).write_bytes(b"")
        with pytest.raises(LayoutError, match="two trees"):
            mmrpc.load_tree(tmp_path / "t")

    @pytest.mark.parametrize(
        ("tree", "match"),
        [
            ({"a": object()}, "'a' is a object"),
            ({1: torch.ones(1)}, "string"),
            ({"a": torch.ones(1).to_sparse()}, "sparse"),
            ({"a": torch.ones(1, requires_grad=True)}, "requires gradients"),
        ],
    )
    def test_what_cannot_be_held(self, tmp_path: Path, tree: dict[Any, Any], match: str) -> None:
        """It is refused, and no directory is left."""
        with pytest.raises(LayoutError, match=match):
            mmrpc.save_tree(tmp_path / "t", tree, arena=True)
        assert os.listdir(tmp_path) == []

    @pytest.mark.needs("root")
    def test_a_full_disk(self, tmp_path: Path, small_tmpfs: Path) -> None:
        """Too little space is an error, and nothing is left behind."""
        with pytest.raises(NoSpaceError):
            mmrpc.save_tree(small_tmpfs / "t", {"a": torch.ones(2**20)}, arena=True)
        assert os.listdir(small_tmpfs) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Any:
    import subprocess

    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=True, timeout=30
    )
    yield path
    gc.collect()
    subprocess.run(["umount", str(path)], check=True, timeout=30)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes an arena's table anew, with its digest."""
    raw = path.read_bytes()
    header = Header.unpack(raw, len(raw), "it")
    columns = json.loads(raw[HEADER_BYTES : HEADER_BYTES + header.table_bytes])
    change(columns)
    table = json.dumps(columns).encode()
    new = Header.of(table)
    head = (new.pack() + table).ljust(new.data_start, b"\0")
    path.write_bytes(head + raw[header.data_start :])


class TestBadArenas:
    def _file(self, tmp_path: Path) -> Path:
        mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(4), "b": {"c": "x"}}, arena=True)
        gc.collect()
        return tmp_path / "t" / "tree.arena"

    def test_missing(self, tmp_path: Path) -> None:
        """A reference to an arena that is gone says so."""
        tree = mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(4)}, arena=True)
        data = pickle.dumps(tree)
        os.unlink(tmp_path / "t" / "tree.arena")
        with pytest.raises(PathNotFoundError):
            pickle.loads(data)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda c: c.update(offset=[2**50]), "has"),
            (lambda c: c.update(offset=[-(2**50)]), "negative"),
            (lambda c: c.update(offset=[1]), "does not suit"),
            (lambda c: c.update(offset=["x"]), "malformed"),
            (lambda c: c.update(shape=[[500]]), "ends at byte"),
            (lambda c: c.update(shape=[[-1]]), "negative"),
            (lambda c: c.update(shape=[[2**40, 2**40]]), "larger"),
            (lambda c: c.update(shape=[{"sizes": [[9, 9]], "dims": 2}]), "ends at byte"),
            (lambda c: c.update(shape=[{"sizes": 3}]), "malformed"),
            (lambda c: c.update(shape=[None]), "malformed"),
            (lambda c: c.update(tree={"a": 7}), "malformed"),
            (lambda c: c.update(tree={"a": -1}), "malformed"),
            (lambda c: c.update(tree={"a": "x"}), "malformed"),
            (lambda c: c.update(tree=[]), "malformed table"),
            (lambda c: c.update(dtype=[3]), "malformed table"),
            (lambda c: c.update(dtypes=["float99"]), "malformed table"),
            (lambda c: c.update(offset=[0, 0]), "malformed table"),
            (lambda c: c.pop("shape"), "malformed table"),
        ],
    )
    def test_bad_rows(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
    ) -> None:
        """A row that makes no sense, or leaves the file, is an error."""
        _rewrite(self._file(tmp_path), change)
        with pytest.raises(LayoutError, match=match):
            mmrpc.load_tree(tmp_path / "t")["a"]

    def test_bad_headers(self, tmp_path: Path) -> None:
        """Magic, sizes and digest are checked."""
        file = self._file(tmp_path)
        good = file.read_bytes()
        bad = {
            b"": "no arena",
            good[:40]: "no arena",
            b"x" * 100: "no arena",
            good[:8] + struct.pack("<Q", 2**62) + good[16:]: "malformed header",
            good[:16] + struct.pack("<Q", 2**62) + good[24:]: "malformed header",
            good[:24] + bytes(16) + good[40:]: "damaged table",
        }
        for raw, match in bad.items():
            arenas._tables._kept.clear()
            file.write_bytes(raw)
            with pytest.raises(LayoutError, match=match):
                mmrpc.load_tree(tmp_path / "t")
            gc.collect()

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        """A truncated arena never opens with other bytes."""
        file = self._file(tmp_path)
        good = file.read_bytes()
        for end in range(0, len(good) - 48, 31):
            file.write_bytes(good[:end])
            with pytest.raises((LayoutError, FileTooShortError)):
                mmrpc.load_tree(tmp_path / "t")["a"]
            gc.collect()

    @settings(
        max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.data())
    def test_changed_bytes_never_crash(self, tmp_path: Path, data: st.DataObject) -> None:
        """An arena with any bytes of its table changed opens, or is a typed error."""
        if not (tmp_path / "t").exists():
            self._file(tmp_path)
            os.rename(tmp_path / "t" / "tree.arena", tmp_path / "good")
        raw = bytearray((tmp_path / "good").read_bytes())
        header = Header.unpack(bytes(raw), len(raw), "it")
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(HEADER_BYTES, HEADER_BYTES + header.table_bytes - 1))
            raw[at] = data.draw(st.integers(32, 126))
        table = bytes(raw[HEADER_BYTES : HEADER_BYTES + header.table_bytes])
        raw[24:40] = digest_of(table)
        (tmp_path / "t" / "tree.arena").write_bytes(raw)
        try:
            _sum_all(_plain(mmrpc.load_tree(tmp_path / "t")))
        except MmrpcError:
            return

    def test_another_table_than_the_senders(self, tmp_path: Path) -> None:
        """A table that somebody changed in place is noticed by the receiver."""
        tree = mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(4)}, arena=True)
        data = pickle.dumps(tree)
        assert isinstance(tree, Tree)
        tree.arena[24:40] = 0
        with pytest.raises(LayoutError, match="another table"):
            pickle.loads(data)


def _sum_all(tree: dict[str, Any]) -> None:
    for value in tree.values():
        if isinstance(value, dict):
            _sum_all(value)
        elif isinstance(value, torch.Tensor):
            torch.Tensor.clone(value)


def test_table_round_trip() -> None:
    """A table is JSON in columns, and reads back as it was."""
    table = Table({"a": 0, "b": {"c": 1}}, [torch.int8, torch.float32], [(2,), ()], [0, 64])
    again = Table.parse(table.dump(), "it")
    assert (again.tree, again.dtypes, again.shapes, again.offsets) == (
        table.tree,
        table.dtypes,
        table.shapes,
        table.offsets,
    )
