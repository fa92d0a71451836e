"""References: what travels in place of a mapped tensor, and how it becomes one again.

A `TensorRef` says where the bytes are and how to read them. Pickling a mapped tensor, or a
plain tensor on a mapped storage, makes one; unpickling opens it, or raises the typed error
that says why not. Only while torch's RPC unpickles, which must not meet an exception, does a
stand-in take its place that raises at its first use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmrpc.core.layout import Layout
from mmrpc.core.location import (
    FileIdentity,
    FileLocation,
    Location,
    MemoryLocation,
    Mode,
    MountLocation,
)
from mmrpc.core.nested import NestedLayout, nested_tensor_of
from mmrpc.core.resolver import get_resolver
from mmrpc.core.storage import MappedStorage, mapped_storage, tensor_of
from mmrpc.errors import LayoutError, MmrpcError, NotSharedError

if TYPE_CHECKING:
    from mmrpc.core.mapping import Mapping
    from mmrpc.core.tensor import MemoryMappedTensor


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A reference to a tensor: where its bytes are, and how to read them.

    It is a small value: it owns nothing, keeps nothing open, and may outlive the file, which
    `open` then says.

    Attributes:
        location: Where the bytes are.
        layout: How to read them.
        mode: How the sender maps them, and the receiver will.
    """

    location: Location
    layout: Layout | NestedLayout
    mode: Mode

    def open(self, mode: str | None = None) -> MemoryMappedTensor:
        """Opens the tensor: exactly the bytes that the sender sees, or a typed error.

        Args:
            mode: ``"r"`` for copy-on-write or ``"r+"`` for shared; None as the sender had it.

        Returns:
            The tensor; its file stays the sender's to delete.

        Raises:
            PathNotFoundError: If there is no such file on this node.
            PathNotReadableError: If this process may not read it.
            PathNotWritableError: If it is to be shared and this process may not write to it.
            FileTooShortError: If the file has fewer bytes than the tensor needs.
            StaleReferenceError: If another file has its name, or the owner of the memory ended.
            NotSharedError: If the bytes are where this node cannot reach them.
        """
        tensor: MemoryMappedTensor = _with_class(self.open_plain(mode), None)
        return tensor

    def open_plain(self, mode: str | None = None) -> torch.Tensor:
        """Like `open`, but gives a plain `torch.Tensor` on the mapped storage."""
        wanted = self.mode if mode is None else parse_mode(mode)
        return _open(self.location, self.layout.check(), wanted)

    def to_json(self) -> str:
        """The reference as one line of JSON, which `from_json` reads in any later version."""
        from mmrpc.core import refjson

        return refjson.dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> TensorRef:
        """Reads a reference; nothing is opened and no code is run.

        Raises:
            LayoutError: If the text is no valid reference.
        """
        from mmrpc.core import refjson

        return refjson.load(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_ref, pack(self)


def _open(location: Location, layout: Layout | NestedLayout, mode: Mode) -> torch.Tensor:
    mapping = get_resolver().attach(location, mode, layout.end_bytes)
    if isinstance(layout, NestedLayout):
        return nested_tensor_of(mapping, layout)
    return tensor_of(mapping, layout)


def parse_mode(mode: str) -> Mode:
    """Reads ``"r"`` or ``"r+"``.

    Raises:
        LayoutError: A ValueError; for anything else.
    """
    try:
        return Mode(mode)
    except ValueError:
        raise LayoutError(f'mode must be "r" or "r+", not {mode!r}') from None


def ref(tensor: torch.Tensor) -> TensorRef:
    """Makes a reference to a mapped tensor or to any plain view of one.

    Args:
        tensor: A tensor on a storage that mmrpc mapped: any strided view, nested ones too.

    Raises:
        NotSharedError: If its bytes are in no file and no shared memory, or not only there: a
            tensor mapped with ``"r"`` that was written to holds values that nobody else has.
    """
    mapping, layout = _mapped(tensor)
    return TensorRef(get_resolver().locate(mapping), layout, mapping.mode)


def _mapped(tensor: torch.Tensor) -> tuple[Mapping, Layout | NestedLayout]:
    """What a tensor is mapped from and how it lies there, if others can have all of it."""
    storage = mapped_storage(tensor)
    if storage is None or storage._mapping is None:
        raise NotSharedError(
            "the tensor is in this process's own memory",
            node=get_resolver().node,
            hint="Make it with MemoryMappedTensor.from_tensor(x, filename=...), or send x itself.",
        )
    mapping, start = storage._mapping, storage._start_bytes
    layout: Layout | NestedLayout
    if tensor.is_nested:
        layout = NestedLayout.of(tensor, start)
    else:
        layout = Layout.of(tensor, start)
    if mapping.mode is Mode.READ:
        _refuse_private_writes(mapping, layout)
    return mapping, layout


def _refuse_private_writes(mapping: Mapping, layout: Layout | NestedLayout) -> None:
    start = layout.offset_bytes - mapping.start_bytes
    if mapping.has_private_writes(start, layout.span_bytes):
        raise NotSharedError(
            'it was opened with mode "r" and written to, and what was written is in this '
            "process only",
            path=mapping.path,
            node=get_resolver().node,
            hint='Send x.clone(), or open the file with mode "r+" to write to it.',
        )


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor, mapped itself or a plain view, can travel by reference."""
    return mapped_storage(tensor) is not None


def reduce_tensor(tensor: torch.Tensor, *, as_plain: bool) -> tuple[Any, ...]:
    """The pickled form of a mapped tensor.

    Args:
        tensor: A tensor on a mapped storage.
        as_plain: Whether the receiver gets a plain tensor or one of the sender's class.
    """
    mapping, layout = _mapped(tensor)
    location = get_resolver().locate(mapping)
    if mapping.packed is None or mapping.packed[0] is not location:
        mapping.packed = location, (_pack_location(location), mapping.mode.value)
    packed = *mapping.packed[1], layout.packed
    if as_plain:
        return _load_plain, packed
    if type(tensor) is _tensor_class():
        return _load, packed
    return _load_as, (type(tensor), *packed)


def reduce_storage(storage: MappedStorage) -> tuple[Any, ...]:
    """The pickled form of a mapped storage, as queues send it with each plain view."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return _load_storage, pack(ref(whole))


# What travels is flat and short: a location's tag and fields, then the layout's.
_FILE, _MEMORY, _MOUNT = "f", "m", "n"


def pack(reference: TensorRef) -> tuple[Any, ...]:
    """A reference as a flat tuple of plain values."""
    location = _pack_location(reference.location)
    return location, reference.mode.value, reference.layout.packed


def _pack_location(location: Location) -> tuple[Any, ...]:
    match location:
        case FileLocation(host, path, identity):
            return _FILE, host, path, *identity
        case MemoryLocation(host, pid, started, fd, inode):
            return _MEMORY, host, pid, started, fd, inode
        case MountLocation(mount, path, host, identity, size_bytes, content, here):
            packed = _MOUNT, mount, path, host, *identity, size_bytes, content
            return (*packed, here) if here else packed


def unpack(*packed: Any) -> TensorRef:
    """Reads what `pack` gave.

    Raises:
        LayoutError: If it is not that.
    """
    return TensorRef(*_unpack(*packed))


def _unpack(
    location: tuple[Any, ...], mode: str, form: tuple[Any, ...]
) -> tuple[Location, Layout | NestedLayout, Mode]:
    try:
        kind = NestedLayout if len(form) == NestedLayout.PACKED_LENGTH else Layout
        return _unpack_location(location), kind.unpack(form), _MODES[mode]
    except MmrpcError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise LayoutError(f"the reference is malformed: {error}") from None


_MODES = {mode.value: mode for mode in Mode}


@functools.lru_cache(maxsize=4096)  # the same tensors travel again and again
def _unpack_location(packed: tuple[Any, ...]) -> Location:
    kind, *fields = packed
    if kind == _FILE:
        host, path, device, inode, generation = fields
        return FileLocation(host, path, FileIdentity(device, inode, generation))
    if kind == _MEMORY:
        return MemoryLocation(*fields)
    if kind == _MOUNT:
        mount, path, host, device, inode, generation, size_bytes, content, *here = fields
        identity = FileIdentity(device, inode, generation)
        return MountLocation(mount, path, host, identity, size_bytes, content, *here)
    raise LayoutError(f"the reference has a location of the unknown kind {kind!r}")


# What pickles name. They must stay importable under these names.


def _rebuild_ref(*packed: Any) -> TensorRef:
    return unpack(*packed)


def _load(*packed: Any) -> Any:
    return _opened(packed, None)


def _load_as(cls: type[torch.Tensor], *packed: Any) -> Any:
    return _opened(packed, cls)


def _load_plain(*packed: Any) -> Any:
    return _opened(packed, torch.Tensor)


def _load_storage(*packed: Any) -> torch.UntypedStorage:
    return unpack(*packed).open_plain().untyped_storage()


def _opened(packed: tuple[Any, ...], cls: type[torch.Tensor] | None) -> Any:
    try:
        location, layout, mode = _unpack(*packed)
        plain = _open(location, layout, mode)
    except Exception as error:
        from mmrpc.core.standin import Unopened, unpickling_for_rpc

        if not unpickling_for_rpc():
            raise
        loader = {None: _load, torch.Tensor: _load_plain}.get(cls, _load_as)
        arguments = packed if loader is not _load_as else (cls, *packed)
        return Unopened(loader, arguments, error)
    return _with_class(plain, cls)


def _with_class(plain: torch.Tensor, cls: type[torch.Tensor] | None) -> Any:
    """Gives a fresh plain tensor a class; None for `MemoryMappedTensor`."""
    if cls is not torch.Tensor:
        plain.__class__ = cls or _tensor_class()
    return plain


@functools.cache
def _tensor_class() -> type[torch.Tensor]:
    from mmrpc.core.tensor import MemoryMappedTensor  # which imports this module

    return MemoryMappedTensor


torch.serialization.add_safe_globals([_load, _load_plain, _load_storage])


__all__ = ["TensorRef", "is_mapped", "parse_mode", "reduce_tensor", "ref"]
