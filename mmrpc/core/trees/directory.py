"""A nested dict of tensors as a directory: a file for each leaf, in tensordict's memmap layout.

``meta.json`` of the top directory is written last, so a directory without one is no tree, and
one that has it is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from mmrpc.core import creation, files
from mmrpc.core.tensor import MemoryMappedTensor
from mmrpc.core.trees import meta as treemeta
from mmrpc.core.trees.meta import META, Leaf, Meta
from mmrpc.errors import LayoutError, PathExistsError, PathNotFoundError

_MAX_META_BYTES: Final = 256 << 20
_MAX_DEPTH: Final = 64


def read_small(path: str, limit_bytes: int = _MAX_META_BYTES) -> bytes:
    """Reads a whole small file, such as a ``meta.json``.

    Raises:
        PathError: The subclass that fits.
        LayoutError: If it is too large to be one.
    """
    fd = files.open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > limit_bytes:
            raise LayoutError(f"{path!r} is too large")
        return file.read()


def write_small(path: str, data: bytes, *, durable: bool = False) -> None:
    """Writes a whole small file, or replaces it; readers see the old or the new one."""
    with files.new_file(path, replace=True) as file:
        files.write(file.fd, [memoryview(data)], len(data), path)
        file.publish(durable=durable)


def make_directory(directory: str) -> bool:
    """Makes a directory, but not its parents; says whether it was missing.

    Raises:
        PathExistsError: If something else has its name.
        PathError: If it cannot be made.
    """
    try:
        os.mkdir(directory)
    except FileExistsError:
        if os.path.isdir(directory):
            return False
        raise PathExistsError(
            "it is no directory", path=directory, hint="Choose another name."
        ) from None
    except OSError as error:
        raise files.path_error(error, directory, writing=True) from None
    return True


class _Writer:
    """Writes one tree, and takes back what it wrote if it fails.

    Args:
        existsok: Whether files that exist are replaced.
        durable: Whether all is on the device in the end.
    """

    def __init__(self, *, existsok: bool, durable: bool) -> None:
        self._existsok = existsok
        self._durable = durable
        self._made: list[str] = []

    def write(
        self, directory: str, tree: Mapping[str, Any], batch_size: tuple[int, ...]
    ) -> dict[str, Any]:
        names = _names(tree)
        self._make_directory(directory)
        saved: dict[str, Any] = {}
        leaves: dict[str, Leaf] = {}
        types: dict[str, str] = {}
        for key, value in tree.items():
            path = os.path.join(directory, names[key])
            if isinstance(value, torch.Tensor):
                saved[key], leaves[key] = self._write_leaf(path, value)
            elif isinstance(value, Mapping):
                types[key] = "TensorDict"
                saved[key] = self.write(path, value, batch_size)
            else:
                types[key] = "NonTensorData"
                saved[key] = self._write_value(path, value)
        meta = Meta(leaves, tuple(types), batch_size)
        self._write_meta(directory, treemeta.dump(meta, types=types))
        return saved

    def _make_directory(self, directory: str) -> None:
        if make_directory(directory):
            self._made.append(directory)
        meta = os.path.join(directory, META)
        if not os.path.lexists(meta):
            return
        if not self._existsok:
            raise PathExistsError(
                "a tree is there already", path=meta, hint="Pass existsok=True to replace it."
            )
        # While its files are replaced it is no tree.
        os.unlink(meta)

    def _write_leaf(self, path: str, value: torch.Tensor) -> tuple[torch.Tensor, Leaf]:
        if value.is_nested:
            sizes = value._nested_tensor_size() if value.layout is torch.strided else None
            if sizes is not None:
                self._write_tensor(f"{path}.shape.memmap", sizes)
            leaf = Leaf(value.dtype, () if sizes is None else tuple(sizes.shape), is_nested=True)
        else:
            leaf = Leaf(value.dtype, tuple(value.shape))
        return self._write_tensor(f"{path}.memmap", value), leaf

    def _write_tensor(self, path: str, value: torch.Tensor) -> torch.Tensor:
        # A tensor of another file is copied: saving a tree is to have all of it in one place.
        tensor = MemoryMappedTensor.from_tensor(
            value,
            filename=path,
            existsok=self._existsok,
            copy_existing=True,
            durable=self._durable,
        )
        self._made.append(path)
        return tensor

    def _write_value(self, path: str, value: Any) -> Any:
        self._make_directory(path)
        self._write_meta(path, treemeta.dump_value(value))
        return value

    def _write_meta(self, directory: str, data: bytes) -> None:
        path = os.path.join(directory, META)
        write_small(path, data, durable=self._durable)
        self._made.append(path)

    def undo(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                if os.path.isdir(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)


def _check(tree: Mapping[str, Any], batch_size: tuple[int, ...], depth: int = 0) -> None:
    """Refuses what cannot be saved before anything that is there is touched."""
    if depth > _MAX_DEPTH:
        raise LayoutError(f"the tree is more than {_MAX_DEPTH} levels deep; is it in itself?")
    _names(tree)
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            creation.check_source(value)
            if not value.is_nested and tuple(value.shape[: len(batch_size)]) != batch_size:
                raise LayoutError(
                    f"{key!r} has shape {tuple(value.shape)}, which does not start with the batch "
                    f"size {batch_size}"
                )
        elif isinstance(value, Mapping):
            _check(value, batch_size, depth + 1)
        else:
            treemeta.check_value(value, key)


def _names(tree: Mapping[str, Any]) -> dict[str, str]:
    """File names of all keys; refuses keys whose files would be one."""
    # Iterating over a tensordict gives rows, not keys.
    names = {key: treemeta.file_stem(key) for key, _ in tree.items()}
    owners: dict[str, str] = {}
    for key, value in tree.items():
        taken = [names[key]]
        if isinstance(value, torch.Tensor):
            taken = [f"{names[key]}.memmap"]
            if value.is_nested:
                taken.append(f"{names[key]}.shape.memmap")
        for name in taken:
            if owners.setdefault(name, key) != key or name == META:
                raise LayoutError(
                    f"the keys {key!r} and {owners[name]!r} would share the file {name!r}"
                )
    return names


def save(
    directory: str,
    tree: Mapping[str, Any],
    *,
    batch_size: tuple[int, ...],
    existsok: bool,
    durable: bool,
) -> dict[str, Any]:
    """Writes a tree as a directory; see `mmrpc.save_tree`. Gives the mapped tree."""
    _check(tree, batch_size)
    writer = _Writer(existsok=existsok, durable=durable)
    try:
        return writer.write(directory, tree, batch_size)
    except BaseException:
        writer.undo()
        raise


def read_meta(directory: str) -> Meta:
    """Reads what a directory holds.

    Raises:
        PathNotFoundError: If it holds no tree, or an incomplete one.
        LayoutError: If its ``meta.json`` is malformed.
    """
    path = os.path.join(directory, META)
    return treemeta.parse(read_meta_text(path), path)


def read_meta_text(path: str, what: str = "tree of tensors") -> bytes:
    """The text of a ``meta.json``; its absence is told as what it means.

    Args:
        path: Of the file.
        what: What its directory should hold.
    """
    try:
        return read_small(path)
    except PathNotFoundError:
        directory = os.path.dirname(path)
        if os.path.isdir(directory):
            reason = f"the directory holds no {what}"
            hint = "Is it still being written? Its meta.json comes last."
        elif os.path.lexists(directory):
            reason, hint = "it is no directory", f"Give the directory of a {what}."
        else:
            reason = f"no {what} is there"
            hint = files.nearest_existing(directory)
        raise PathNotFoundError(reason, path=directory, hint=hint) from None


def load(directory: str, mode: str | None, depth: int = 0) -> dict[str, Any]:
    """Maps the tree in a directory; see `mmrpc.load_tree`."""
    if depth > _MAX_DEPTH:
        raise LayoutError(f"{directory!r} is more than {_MAX_DEPTH} levels deep")
    meta = read_meta(directory)
    tree: dict[str, Any] = {
        key: load_leaf(directory, key, leaf, mode) for key, leaf in meta.leaves.items()
    }
    for key in meta.children:
        child = os.path.join(directory, treemeta.file_stem(key))
        path = os.path.join(child, META)
        is_value, value = treemeta.parse_value(read_meta_text(path), path)
        tree[key] = value if is_value else load(child, mode, depth + 1)
    return tree


def load_leaf(directory: str, key: str, leaf: Leaf, mode: str | None) -> torch.Tensor:
    """Maps one tensor of a directory.

    Raises:
        PathError: The subclass that fits, `FileTooShortError` among them.
    """
    path = leaf_path(directory, key)
    shape: tuple[int, ...] | torch.Tensor = leaf.shape
    if leaf.has_no_file and not os.path.lexists(path):
        return MemoryMappedTensor.empty(shape, dtype=leaf.dtype)
    if leaf.is_nested:
        sizes_path = f"{path.removesuffix('.memmap')}.shape.memmap"
        shape = MemoryMappedTensor.from_filename(
            sizes_path, torch.int64, leaf.shape, mode="r"
        ).clone()
    return MemoryMappedTensor.from_filename(path, leaf.dtype, shape, mode=mode)


def leaf_path(directory: str, key: str) -> str:
    """Where the tensor of a key is."""
    return os.path.join(directory, f"{treemeta.file_stem(key)}.memmap")
