"""Nested dicts of tensors on disk: a directory with a file for each, or one arena file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from mmrpc.core import creation, reference
from mmrpc.core.tensor import MemoryMappedTensor
from mmrpc.core.trees import arena as arenas
from mmrpc.core.trees import directory as treedir
from mmrpc.core.trees.arena import Tree
from mmrpc.core.trees.meta import META
from mmrpc.errors import LayoutError, PathExistsError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename

ARENA: Final = "tree.arena"
"""Name of the arena file in its directory."""


def save_tree(
    directory: Filename | None,
    tree: Mapping[str, Any],
    *,
    arena: bool = False,
    batch_size: tuple[int, ...] = (),
    existsok: bool = False,
    durable: bool = False,
) -> dict[str, Any] | Tree:
    """Writes nested dicts of tensors.

    Args:
        directory: Where to; made if it is missing, but not its parents. None, with `arena`, for
            shared memory without a name.
        tree: Nested dicts of tensors with string keys. Strings, numbers, booleans, None, and
            lists and dicts of them are kept too, if JSON gives them back as they are.
        arena: Whether all goes into one file, ``tree.arena``: for many small tensors 10 times
            faster to write, and to send. If not, each tensor gets a file of its own, in the
            layout that tensordict's ``memmap`` writes and ``load_memmap`` reads.
        batch_size: For a directory: the first sizes that all tensors share, for tensordict.
        existsok: Whether a tree that is there is replaced. Who mapped the old one keeps it.
        durable: Whether all is on the device, not only in the page cache, on return.

    Returns:
        The saved tensors, mapped: nested dicts, or for an arena a `Tree`, which a queue or RPC
        sends as one reference.

    Raises:
        LayoutError: If a key or a value cannot be saved.
        PathExistsError: If a tree is there and `existsok` is false.
        NoSpaceError: If there is too little space; nothing is left behind.
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"a dict of tensors is needed, not {type(tree).__name__}")
    if directory is None:
        if not arena:
            raise LayoutError("a directory is needed", hint="Or pass arena=True for shared memory.")
        return arenas.write(tree, None)
    path = creation.absolute_path(directory, writing=True)
    other = os.path.join(path, META if arena else ARENA)
    if os.path.lexists(other):
        raise PathExistsError(
            "a tree of the other kind is there", path=other, hint="Choose another directory."
        )
    if not arena:
        return treedir.save(
            path, tree, batch_size=tuple(batch_size), existsok=existsok, durable=durable
        )
    made = treedir.make_directory(path)
    try:
        file = os.path.join(path, ARENA)
        return arenas.write(tree, file, existsok=existsok, durable=durable)
    except BaseException:
        if made:
            os.rmdir(path)
        raise


def load_tree(directory: Filename, mode: str | None = None) -> dict[str, Any] | Tree:
    """Maps what `save_tree` or tensordict's ``memmap`` wrote.

    Args:
        directory: Where it is.
        mode: ``"r"``: writes stay in this process. ``"r+"``: writes reach the files. None:
            ``"r+"`` for files that may be written to, else ``"r"``.

    Returns:
        Nested dicts of mapped tensors, or for an arena a `Tree`.

    Raises:
        PathNotFoundError: If no tree is there, or one that is still being written.
        LayoutError: If it is malformed or holds pickled values, which are never loaded.
        FileTooShortError: If a file has fewer bytes than its tensor needs.
    """
    if mode is not None:
        reference.parse_mode(mode)
    path = creation.absolute_path(directory)
    file = os.path.join(path, ARENA)
    if not os.path.lexists(file):
        return treedir.load(path, mode)
    if os.path.lexists(os.path.join(path, META)):
        raise LayoutError(f"{path!r} holds two trees: {ARENA} and {META}")
    return load_arena(file, mode)


def load_arena(path: str, mode: str | None) -> Tree:
    """Maps one arena file, however long it is."""
    try:
        size_bytes = os.stat(path).st_size
    except OSError:
        size_bytes = 0  # opening says what is wrong
    arena = MemoryMappedTensor.from_filename(path, torch.uint8, (size_bytes,), mode=mode)
    return arenas.open_arena(arena, repr(path))


__all__ = ["ARENA", "Tree", "load_arena", "load_tree", "save_tree"]
