"""Trees of tensors as directories, and tensordict's memmap layout in both directions."""

from __future__ import annotations

import json
import os
import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mmrpc
from mmrpc import MemoryMappedTensor
from mmrpc.core.trees import meta as treemeta
from mmrpc.errors import (
    FileTooShortError,
    LayoutError,
    NoSpaceError,
    NotRegularFileError,
    PathExistsError,
    PathNotFoundError,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensordict = pytest.importorskip("tensordict")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.arange(6.0).view(2, 3), torch.ones(1, 3)])


def example() -> dict[str, Any]:
    """A tree with every kind of leaf."""
    return {
        "a": torch.arange(6).view(2, 3),
        "sub": {"b": torch.randn(2, 4).bfloat16(), "deep": {"c": torch.tensor([True, False])}},
        "nested": nested(),
        "empty": torch.zeros(2, 0),
        "odd/key": torch.ones(2, dtype=torch.uint16),
        "..": torch.ones(2, dtype=torch.complex64),
        "text": "hello",
        "number": 3,
        "list": [1.5, None, {"x": True}],
        "none": None,
    }


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same keys and values."""
    if isinstance(b, torch.Tensor):
        if b.is_nested:
            return all(map(same, a.unbind(0), b.unbind(0)))
        return a.dtype == b.dtype and torch.equal(torch.Tensor.clone(a), b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in b)
    return type(a) is type(b) and a == b


class TestDirectory:
    def test_a_tree_comes_back(self, tmp_path: Path) -> None:
        """What was saved is loaded, nested dicts and values that are no tensors among it."""
        tree = example()
        saved = mmrpc.save_tree(tmp_path / "t", tree)
        loaded = mmrpc.load_tree(tmp_path / "t")
        assert same(saved, tree)
        assert same(loaded, tree)
        assert isinstance(loaded["a"], MemoryMappedTensor)
        assert loaded["a"].filename == str(tmp_path / "t" / "a.memmap")

    def test_writes_reach_the_file_by_mode(self, tmp_path: Path) -> None:
        """As a single tensor: shared with "r+" or None, private with "r"."""
        mmrpc.save_tree(tmp_path / "t", {"a": torch.zeros(2)})
        mmrpc.load_tree(tmp_path / "t")["a"][0] = 1
        mmrpc.load_tree(tmp_path / "t", mode="r")["a"][1] = 1
        assert mmrpc.load_tree(tmp_path / "t")["a"].tolist() == [1, 0]
        with pytest.raises(LayoutError, match="mode"):
            mmrpc.load_tree(tmp_path / "t", mode="w")

    def test_an_existing_tree_is_kept(self, tmp_path: Path) -> None:
        """A tree is replaced only if asked; who mapped the old one keeps its values."""
        old = mmrpc.save_tree(tmp_path / "t", {"a": torch.zeros(2)})
        with pytest.raises(PathExistsError, match="existsok=True"):
            mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(2)})
        mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(3)}, existsok=True)
        assert old["a"].tolist() == [0, 0]
        assert mmrpc.load_tree(tmp_path / "t")["a"].tolist() == [1, 1, 1]

    def test_a_bad_value_leaves_all_as_it_was(self, tmp_path: Path) -> None:
        """What cannot be saved is found before anything that is there is touched."""
        mmrpc.save_tree(tmp_path / "t", {"a": torch.zeros(2)})
        for bad in (object(), {1}, (1, 2), {"k": {1: 2}}, torch.ones(1).to_sparse()):
            with pytest.raises(LayoutError):
                mmrpc.save_tree(tmp_path / "t", {"a": torch.ones(2), "b": bad}, existsok=True)
        assert mmrpc.load_tree(tmp_path / "t")["a"].tolist() == [0, 0]

    def test_a_failed_save_leaves_nothing(self, tmp_path: Path) -> None:
        """When a file cannot be written, those before it are taken back."""
        tree = {"a": torch.zeros(2), "sub": {"b": torch.zeros(2**13)}}
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            with pytest.raises(NoSpaceError):
                mmrpc.save_tree(tmp_path / "t", tree)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("key", ["shape", "device", "_type", "_format_version", "_mmrpc"])
    def test_keys_that_meta_json_uses(self, tmp_path: Path, key: str) -> None:
        """A key that would be lost in meta.json is refused."""
        with pytest.raises(LayoutError, match="uses itself"):
            mmrpc.save_tree(tmp_path / "t", {key: torch.ones(1)})
        assert not (tmp_path / "t").exists()

    @pytest.mark.parametrize(
        "tree",
        [
            {1: torch.ones(1)},
            {"n": nested(), "n.shape": torch.ones(1)},
            {"a.memmap": {"x": torch.ones(1)}, "a": torch.ones(1)},
        ],
        ids=["no string", "sizes of a nested tensor", "directory and file"],
    )
    def test_keys_that_clash(self, tmp_path: Path, tree: dict[Any, Any]) -> None:
        """Keys that are no strings, or whose files would be one, are refused."""
        with pytest.raises(LayoutError, match=r"string|share the file"):
            mmrpc.save_tree(tmp_path / "t", tree)

    def test_a_tree_in_itself(self, tmp_path: Path) -> None:
        """A dict that holds itself is an error, not a recursion."""
        tree: dict[str, Any] = {}
        tree["again"] = tree
        for arena in (False, True):
            with pytest.raises(LayoutError, match="levels deep"):
                mmrpc.save_tree(tmp_path / "t", tree, arena=arena)

    def test_a_wrong_batch_size(self, tmp_path: Path) -> None:
        """The batch size is checked against each tensor."""
        with pytest.raises(LayoutError, match=r"'b' has shape \(3,\)"):
            mmrpc.save_tree(
                tmp_path / "t", {"a": torch.ones(2), "b": torch.ones(3)}, batch_size=(2,)
            )

    def test_no_mapping(self, tmp_path: Path) -> None:
        """A tree is a dict."""
        with pytest.raises(TypeError, match="a dict of tensors is needed, not list"):
            mmrpc.save_tree(tmp_path / "t", [torch.ones(1)])  # type: ignore[arg-type]


class TestBadDirectories:
    """A directory is not trusted either."""

    def _save(self, path: Path) -> dict[str, Any]:
        mmrpc.save_tree(path, {"a": torch.zeros(4), "sub": {"b": torch.ones(1)}, "v": "x"})
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
        return meta

    def test_no_tree(self, tmp_path: Path) -> None:
        """A missing directory, and one whose tree is not complete yet."""
        with pytest.raises(PathNotFoundError, match="no tree of tensors is there"):
            mmrpc.load_tree(tmp_path / "none")
        with pytest.raises(PathNotFoundError, match="the directory holds no tree of tensors"):
            mmrpc.load_tree(tmp_path)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"a": {"dtype": "torch.float99", "shape": [4]}}, "float99"),
            ({"a": {"dtype": "torch.float32", "shape": [-4]}}, "shape"),
            ({"a": {"dtype": "torch.float32", "shape": "4"}}, "shape"),
            ({"a": {"dtype": "torch.float32", "shape": [2**62, 2**62]}}, "larger"),
            ({"a": {"dtype": "torch.float32", "shape": [1], "is_nested": True}}, "nested"),
            ({"_class": "tensordict:LazyStackedTensorDict"}, "LazyStackedTensorDict"),
            ({"_format_version": 99}, "version 99"),
            ({"shape": "x"}, "malformed"),
        ],
    )
    def test_bad_meta(self, tmp_path: Path, change: dict[str, Any], match: str) -> None:
        """A malformed meta.json says what is wrong with it."""
        meta = self._save(tmp_path / "t")
        (tmp_path / "t" / "meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(LayoutError, match=match):
            mmrpc.load_tree(tmp_path / "t")

    @pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
    def test_no_meta(self, tmp_path: Path, text: str) -> None:
        """A meta.json that is no JSON object is an error."""
        self._save(tmp_path / "t")
        (tmp_path / "t" / "meta.json").write_text(text)
        with pytest.raises(LayoutError, match="no JSON"):
            mmrpc.load_tree(tmp_path / "t")

    def test_a_short_or_missing_leaf(self, tmp_path: Path) -> None:
        """Files are neither grown nor made by loading."""
        self._save(tmp_path / "t")
        os.truncate(tmp_path / "t" / "a.memmap", 15)
        with pytest.raises(FileTooShortError):
            mmrpc.load_tree(tmp_path / "t")
        assert os.path.getsize(tmp_path / "t" / "a.memmap") == 15
        os.unlink(tmp_path / "t" / "a.memmap")
        with pytest.raises(PathNotFoundError):
            mmrpc.load_tree(tmp_path / "t")

    def test_keys_do_not_leave_the_directory(self, tmp_path: Path) -> None:
        """A key with dots and slashes names a file inside the directory."""
        meta = self._save(tmp_path / "t")
        torch.ones(4).numpy().tofile(tmp_path / "a.memmap")
        meta["../a"] = meta.pop("a")
        (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(PathNotFoundError, match=r"\.\.%2Fa\.memmap"):
            mmrpc.load_tree(tmp_path / "t")

    def test_a_link_in_place_of_a_leaf(self, tmp_path: Path) -> None:
        """Links inside a tree are refused: only the caller's own path may be one."""
        self._save(tmp_path / "t")
        os.rename(tmp_path / "t" / "a.memmap", tmp_path / "elsewhere")
        (tmp_path / "t" / "a.memmap").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(NotRegularFileError, match="symbolic link"):
            mmrpc.load_tree(tmp_path / "t")

    def test_a_pickled_value_is_not_loaded(self, tmp_path: Path) -> None:
        """What tensordict pickled would run code, and is refused by name."""
        td = tensordict.TensorDict({"x": tensordict.NonTensorData(object)}, [])
        td.memmap(tmp_path / "t")
        with pytest.raises(LayoutError, match="pickled value"):
            mmrpc.load_tree(tmp_path / "t")


class TestTensordict:
    def test_ours_is_read_there(self, tmp_path: Path) -> None:
        """tensordict loads what save_tree wrote, the batch size too."""
        tree = {k: v for k, v in example().items() if k != ".."}
        mmrpc.save_tree(tmp_path / "t", tree, batch_size=(2,))
        td = tensordict.TensorDict.load_memmap(tmp_path / "t")
        assert td.batch_size == (2,)
        assert same(td["sub", "deep", "c"], tree["sub"]["deep"]["c"])
        assert same(td["odd/key"], tree["odd/key"])
        assert same(td.get("nested"), tree["nested"])
        assert td["empty"].shape == (2, 0)
        assert td["text"] == "hello"
        assert td["list"] == tree["list"]

    def test_theirs_is_read_here(self, tmp_path: Path) -> None:
        """load_tree loads what tensordict's memmap wrote."""
        tree = example()
        values = {k: tensordict.NonTensorData(tree[k]) for k in ("number", "list", "text")}
        tensordict.TensorDict(tree | values, batch_size=[2]).memmap(tmp_path / "t")
        loaded = mmrpc.load_tree(tmp_path / "t")
        del tree["none"]  # which tensordict leaves out
        assert same({k: loaded[k] for k in tree}, tree)

    def test_a_tensordict_is_a_tree(self, tmp_path: Path) -> None:
        """A tensordict itself can be saved, as a directory and as an arena."""
        td = tensordict.TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
        for arena in (False, True):
            mmrpc.save_tree(tmp_path / f"t{arena}", td, arena=arena)
            loaded = mmrpc.load_tree(tmp_path / f"t{arena}")
            assert loaded["b"]["c"].tolist() == [0, 0]

    @pytest.mark.parametrize("key", ["a/b", "a b", "%", "", ".", "..", "é", "a\nb", "C:x", "w.x"])
    def test_names_of_files(self, tmp_path: Path, key: str) -> None:
        """A key's file is called what tensordict calls it."""
        tensordict.TensorDict({key: torch.ones(1)}, []).memmap(tmp_path / "t")
        assert (tmp_path / "t" / f"{treemeta.file_stem(key)}.memmap").exists()
        assert mmrpc.load_tree(tmp_path / "t")[key].tolist() == [1]


def test_leaves_travel_as_references(tmp_path: Path) -> None:
    """A loaded tree pickles as references to its files."""
    tree = mmrpc.save_tree(tmp_path / "t", {"a": torch.randn(10_000), "b": torch.randn(10_000)})
    data = pickle.dumps(tree)
    assert len(data) < 600
    assert same(pickle.loads(data), {k: torch.Tensor.clone(v) for k, v in tree.items()})
