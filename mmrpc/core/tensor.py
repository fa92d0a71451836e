"""`MemoryMappedTensor`: a CPU tensor whose storage is a file, or anonymous shared memory."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from mmrpc.core import creation, mapping, reference, upkeep, wrapping
from mmrpc.core.constructors import Constructors, Device, Size, check_device
from mmrpc.core.storage import mapped_storage
from mmrpc.errors import LayoutError, NotSharedError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename
    from mmrpc.core.reference import TensorRef

_T = TypeVar("_T", bound=torch.Tensor)

_getitem = torch.Tensor.__getitem__


def wrap(cls: type[_T], plain: torch.Tensor) -> _T:
    """Makes a fresh plain tensor one of `cls`, on the same storage."""
    plain.__class__ = cls
    return plain  # type: ignore[return-value]


class MemoryMappedTensor(Constructors):
    """A CPU tensor whose storage is a file, or anonymous shared memory.

    It is a `torch.Tensor` for every torch function, may be larger than RAM, and when it is
    pickled, put into a queue or sent by RPC, only a reference to its bytes travels. Opening the
    reference elsewhere gives those very bytes, or a typed error that says why not.

    Make one with `from_tensor` (a copy), `empty`, `zeros`, `ones`, `full` and their ``_like``
    forms (new), `from_filename` (an existing file) or `from_storage` (an existing storage).
    Indexing, `unbind`, `chunk` and `split` keep the class where torch makes a view; other torch
    functions give plain tensors, of which views still write to the file.

    The file holds the elements in row-major order and nothing else. It belongs to the caller:
    nothing here ever deletes it. A tensor cannot require gradients.

    Args:
        source: A file name, mapped as by `from_filename`; a storage, as by `from_storage`; or a
            tensor, copied to `filename` as by `from_tensor`, or without one wrapped as it is:
            then it has no file, and travels only if it is on a mapped storage already.
        dtype: Dtype of the file's or storage's elements. Not for tensors.
        shape: Shape of the file's, storage's or copied data.
        index: Index applied to the result.
        device: None or the CPU.
        handler: Internal; None.
        filename: File to copy a tensor to, or the file that a storage is mapped from.

    Raises:
        TypeError: If the arguments do not go together.
        LayoutError: A ValueError too; for another device.
    """

    # Results of torch functions are plain tensors, at no cost.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        source: Any,
        *,
        dtype: torch.dtype | None = None,
        shape: Size | None = None,
        index: Any = None,
        device: Device = None,
        handler: None = None,
        filename: Filename | None = None,
    ) -> Self:
        """See the class."""
        check_device(device)
        if handler is not None:
            raise TypeError("handler is internal: use from_handler")
        if isinstance(source, (torch.UntypedStorage, torch.TypedStorage)):
            return cls.from_storage(
                source, dtype=dtype, shape=shape, index=index, filename=filename
            )
        if isinstance(source, torch.Tensor):
            if dtype is not None:
                raise TypeError("dtype is not for a tensor: convert it with x.to(dtype)")
            if filename is None:
                plain = wrapping.alias(source)
                return cls._indexed(plain, index)
            copy = cls.from_tensor(source, filename=filename, shape=shape)
            return cls._indexed(copy, index)
        if filename is not None:
            raise TypeError("a file name was given twice")
        if dtype is None or shape is None:
            raise TypeError("a file needs dtype= and shape=: it holds the elements alone")
        return cls.from_filename(source, dtype, shape, index)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in ``__new__``."""

    @classmethod
    def _indexed(cls, plain: torch.Tensor, index: Any) -> Self:
        tensor = wrap(cls, plain)
        return tensor if index is None else tensor[index]  # type: ignore[return-value]

    @classmethod
    def from_tensor(
        cls,
        input: torch.Tensor,
        *,
        filename: Filename | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        copy_data: bool = True,
        shape: Size | None = None,
        durable: bool = False,
    ) -> Self:
        """Copies a tensor into a file or into anonymous shared memory.

        A mapped `input` is returned as it is if that is what was asked for: `filename` is its
        own file (not opened with ``"r"``), or None and it has no file.

        Args:
            input: Any strided tensor, nested ones too; from other devices it is copied.
            filename: The file, which the caller owns; None for anonymous shared memory.
            existsok: Whether a file of that name is replaced. Who mapped the old one keeps it.
            copy_existing: Whether data that is in a file may be copied to another one.
            copy_data: Whether the values are copied; if not, the result holds zeros.
            shape: Shape to which `input` is broadcast; a 2-D tensor for nested ones.
            durable: Whether the file is on the device, not only in the page cache, on return.

        Raises:
            TypeError: If `input` is no tensor.
            LayoutError: If it requires gradients, or raw bytes cannot hold it.
            PathExistsError: If the name is taken and `existsok` is false.
            MmrpcError: If it is in another file and `copy_existing` is false.
            NoSpaceError: If there is too little space; nothing is left behind.
        """
        source = creation.check_source(input)
        if isinstance(input, MemoryMappedTensor):
            if wrapping.is_where_asked(input, filename, shape):
                return input  # type: ignore[return-value]
            wrapping.check_copy_allowed(input, filename, copy_existing)
        layout, dense = creation.layout_of_copy(source, shape)
        pieces = creation.pieces_of(dense) if copy_data else None
        return wrap(
            cls,
            creation.new(layout, pieces, filename=filename, existsok=existsok, durable=durable),
        )

    @classmethod
    def from_filename(
        cls,
        filename: Filename,
        dtype: torch.dtype,
        shape: Size,
        index: Any = None,
        mode: str | None = None,
        *,
        offset: int = 0,
    ) -> Self:
        """Maps an existing file; nothing is created, grown or read ahead.

        Args:
            filename: The file, which stays the caller's.
            dtype: Dtype of its elements.
            shape: Shape; a 2-D tensor for a nested one. The file may be larger.
            index: Index applied to the result.
            mode: ``"r"``: writes stay in this process. ``"r+"``: writes reach the file. None:
                ``"r+"`` if the file may be written to, else ``"r"``. All that open a file with
                ``"r"`` in one process share the pages that they wrote to.
            offset: Bytes before the first element; a multiple of the dtype's alignment.

        Raises:
            PathNotFoundError: If there is no such file.
            NotRegularFileError: If it is a link, a directory, a FIFO or a device.
            PathNotReadableError: If it may not be read.
            PathNotWritableError: If `mode` is ``"r+"`` and it may not be written to.
            FileTooShortError: If it has fewer bytes than the tensor needs.
            LayoutError: A ValueError too; for another mode or an offset that does not suit.
        """
        wanted = None if mode is None else reference.parse_mode(mode)
        path = creation.absolute_path(filename)
        layout = creation.layout_for(dtype, wrapping.size_of(shape), offset)
        if wanted is None:
            mapped = mapping.map_writable_or_private(path, layout.end_bytes)
        else:
            mapped = mapping.map_file(path, wanted, layout.end_bytes)
        return cls._indexed(creation.view(mapped, layout), index)

    @classmethod
    def from_storage(
        cls,
        storage: torch.UntypedStorage | torch.TypedStorage,
        *,
        shape: Size | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        index: Any = None,
        filename: Filename | None = None,
        handler: None = None,
    ) -> Self:
        """Views an existing storage; nothing is copied.

        Args:
            storage: The storage. If it is mapped from a file, the result keeps that file and
                travels by reference.
            shape: Shape; None for 1-D, a 2-D tensor for a nested one.
            dtype: Dtype; None reads an untyped storage as int64, and a typed one only if its
                dtype is the default one.
            device: None or the CPU.
            index: Index applied to the result.
            filename: The file that the storage is mapped from, if it does not say so itself.
            handler: Internal; None.

        Raises:
            LayoutError: If the storage has another file, or the shape does not fit.
        """
        check_device(device)
        if handler is not None:
            raise TypeError("handler is internal: use from_handler")
        return cls._indexed(wrapping.from_storage(storage, shape, dtype, filename), index)

    @classmethod
    def from_handler(
        cls, handler: TensorRef, dtype: torch.dtype, shape: Size, index: Any = None
    ) -> Self:
        """Maps a shared-memory handler.

        Deprecated: the handler is private; send the tensor, or use `ref`.

        Args:
            handler: What the private ``_handler`` of a tensor gave.
            dtype: Dtype of the data.
            shape: Shape; a 2-D tensor for a nested one.
            index: Index applied to the result.
        """
        _warn_deprecated("from_handler")
        storage = handler.open_plain().untyped_storage()
        return cls.from_storage(storage, dtype=dtype, shape=shape, index=index)

    @property
    def filename(self) -> str:
        """Absolute path of the file that holds the data.

        Raises:
            NotSharedError: A RuntimeError; if there is none.
        """
        storage = mapped_storage(self)
        path = None if storage is None or storage._mapping is None else storage._mapping.path
        if path is None:
            raise NotSharedError(
                "the tensor has no file", hint="Make it with filename=... to give it one."
            )
        return path

    def ref(self) -> TensorRef:
        """Makes a reference to this tensor, which any view of it can have; see `TensorRef`.

        Raises:
            NotSharedError: If nobody else can reach its bytes, or all of them.
        """
        return reference.ref(self)

    def flush(self, *, async_: bool = False) -> None:
        """Writes what was changed to the file.

        Args:
            async_: Whether to only start it. If not, all is on the file system on return.

        Raises:
            NotSharedError: If it was opened with ``"r"`` and written to: that has no file.
            NoSpaceError: If the file system has no space for it after all.
        """
        upkeep.flush(self, wait=not async_)

    def advise(self, advice: str) -> None:
        """Tells the kernel how the tensor will be read.

        Args:
            advice: ``"sequential"``, ``"random"`` (cold random rows: no read-ahead),
                ``"willneed"`` (start to read now), ``"dontneed"`` (drop from memory what can be
                read again) or ``"hugepage"``.

        Raises:
            LayoutError: A ValueError too; for other advice.
        """
        upkeep.advise(self, advice)

    def check(self) -> None:
        """Checks that what is mapped is still there under its name, whole and the same.

        A file that was truncated while it is mapped cannot be read without a SIGBUS, which
        ends the process: nothing but a check before use can help.

        Raises:
            PathNotFoundError: If its name is gone.
            StaleReferenceError: If its name belongs to another file.
            FileTooShortError: If it was truncated.
        """
        upkeep.check(self)

    def __getitem__(self, index: Any) -> torch.Tensor:
        kind = type(index)
        if kind is torch.Tensor:
            rows = wrapping.gather(self, index)
            if rows is not None:
                return rows
        elif kind is not int and kind is not slice and "functorch.dim" in sys.modules:
            wrapping.refuse_dims(index)
        out = _getitem(self, index)
        if out._is_view() or (out.is_inference() and wrapping.same_storage(out, self)):
            return self._part(out, index)
        return out

    def _part(self, view: torch.Tensor, index: Any) -> Self:
        """Gives a fresh plain view the class, and what the deprecated properties tell."""
        view.__class__ = type(self)
        view._root = self.__dict__.get("_root", self)  # type: ignore[attr-defined]
        view._index = index  # type: ignore[attr-defined]
        return view  # type: ignore[return-value]

    def unbind(self, dim: int) -> tuple[Self, ...]:  # type: ignore[override]
        """The slices along a dimension, as `torch.Tensor.unbind`; they keep the file.

        Under `torch.compile`, here as in `chunk` and `split`, they are plain tensors.
        """
        parts = super().unbind(dim)
        if torch.compiler.is_compiling():
            return parts  # type: ignore[return-value]
        before = (slice(None),) * (dim % max(self.dim(), 1))
        return tuple([self._part(part, (*before, i)) for i, part in enumerate(parts)])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """`chunks` views, as `torch.Tensor.chunk`; they keep the file."""
        return self._slices(super().chunk(chunks, dim), dim)

    def split(  # type: ignore[override]
        self, split_size: int | list[int], dim: int = 0
    ) -> tuple[Self, ...]:
        """Views of `split_size` rows, as `torch.Tensor.split`; they keep the file."""
        return self._slices(super().split(split_size, dim), dim)  # type: ignore[no-untyped-call]

    def _slices(self, parts: Any, dim: int) -> tuple[Self, ...]:
        if torch.compiler.is_compiling():
            return tuple(parts)
        before = (slice(None),) * (dim % max(self.dim(), 1))
        out, start = [], 0
        for part in parts:
            end = start + part.shape[dim]
            out.append(self._part(part, (*before, slice(start, end))))
            start = end
        return tuple(out)

    def resize_(self, *sizes: Any, memory_format: torch.memory_format | None = None) -> Self:
        """As `torch.Tensor.resize_`, within the bytes that it has.

        Raises:
            RuntimeError: If it needs more of them; it is as it was then.
        """
        before = self.shape, self.stride(), self.storage_offset()
        try:
            torch.Tensor.resize_(
                self, *sizes, memory_format=memory_format or torch.contiguous_format
            )
        except RuntimeError:
            # Torch sets the shape first, and then finds that the storage cannot grow.
            self.as_strided_(*before)
            raise
        return self

    @property
    def index(self) -> Any:
        """The last index that made this tensor out of another.

        Deprecated: it has no replacement.
        """
        _warn_deprecated("index")
        return self.__dict__.get("_index")

    @property
    def parent_shape(self) -> Any:
        """The shape of the tensor that this one was indexed from; 2-D sizes if nested.

        Deprecated: it has no replacement.
        """
        _warn_deprecated("parent_shape")
        root = self.__dict__.get("_root", self)
        return root._nested_tensor_size() if root.is_nested else root.shape

    @property
    def _handler(self) -> TensorRef:
        storage = mapped_storage(self)
        if storage is None:
            return self.ref()  # says why there is none
        return reference.ref(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refused: a mapped tensor cannot require gradients.

        Raises:
            LayoutError: A RuntimeError; unless `requires_grad` is false.
        """
        if requires_grad:
            _refuse_gradients()
        return self

    @property
    def requires_grad(self) -> bool:
        """False: a mapped tensor cannot require gradients."""
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reference.reduce_tensor(self, as_plain=False)

    def __copy__(self) -> Self:
        return self._part(self.detach(), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent copy, in anonymous shared memory."""
        layout, dense = creation.layout_of_copy(self.detach(), None)
        copy = wrap(
            type(self),
            creation.new(layout, creation.pieces_of(dense), filename=None, existsok=False),
        )
        memo[id(self)] = copy
        return copy

    def __format__(self, spec: str) -> str:
        # torch formats an element's value for its own class only.
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _refuse_gradients() -> None:
    raise LayoutError(
        "a mapped tensor cannot require gradients",
        hint="Use x.detach().requires_grad_(), or a Parameter on x.detach().",
    )


def _warn_deprecated(name: str) -> None:
    warnings.warn(
        f"MemoryMappedTensor.{name} is private, will go, and has no replacement",
        DeprecationWarning,
        stacklevel=3,
    )


__all__ = ["MemoryMappedTensor", "wrap"]
