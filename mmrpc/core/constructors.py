"""The constructors that make a new tensor of a given shape.

They are all one: a shape read, a device checked, and `creation.new` called with zeros or a
value. A base class of `MemoryMappedTensor`, so that its file can be about what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, overload

import torch

from mmrpc.core import creation
from mmrpc.core.layout import parse_size
from mmrpc.errors import LayoutError

if TYPE_CHECKING:
    from mmrpc.core.creation import Filename

Size = Sequence[int] | torch.Tensor
Device = torch.device | str | int | None


class How(TypedDict, total=False):
    """The keywords that all of `Constructors` take.

    Attributes:
        dtype: None, as by default, for `torch.get_default_dtype()`.
        device: None or the CPU.
        filename: The file, which the caller owns; None for anonymous shared memory.
        existsok: Whether a file of that name is replaced, False by default. Who mapped the old
            one keeps it.
        durable: Whether the file is on the device, not only in the page cache, on return; False
            by default.
    """

    dtype: torch.dtype | None
    device: Device
    filename: Filename | None
    existsok: bool
    durable: bool


class Constructors(torch.Tensor):
    """``empty``, ``zeros``, ``ones``, ``full`` and their ``_like`` forms.

    All take ``shape``, the sizes where they are not given as arguments (a 2-D integer tensor
    gives a nested tensor, each row the sizes of one component), the keywords of `How`, and raise:

    - ``PathExistsError``: if the name is taken and ``existsok`` is false.
    - ``NotRegularFileError``: if the name is a link, a directory or a device.
    - ``NoSpaceError``: if its space cannot be reserved; nothing is left behind.
    - ``LayoutError`` (a RuntimeError): for a negative size or another device.
    """

    @classmethod
    def _new(
        cls,
        size: tuple[Any, ...],
        shape: Any,
        value: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Device = None,
        filename: Filename | None = None,
        existsok: bool = False,
        durable: bool = False,
    ) -> Self:
        check_device(device)
        sizes = parse_size(size, shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        layout = creation.layout_for(dtype, sizes)
        pieces = None if value is None else creation.filled(layout, value)
        tensor = creation.new(layout, pieces, filename=filename, existsok=existsok, durable=durable)
        tensor.__class__ = cls
        return tensor  # type: ignore[return-value]

    @overload
    @classmethod
    def empty(cls, *size: int, **how: Unpack[How]) -> Self: ...
    @overload
    @classmethod
    def empty(cls, shape: Size, **how: Unpack[How]) -> Self: ...
    @classmethod
    def empty(cls, *size: Any, shape: Any = None, **how: Unpack[How]) -> Self:
        """Makes a tensor whose values are not set (they are zeros: a new file has no others).

        Its space is reserved, so that writing to it later cannot fail for lack of any.
        """
        return cls._new(size, shape, None, **how)

    @overload
    @classmethod
    def zeros(cls, *size: int, **how: Unpack[How]) -> Self: ...
    @overload
    @classmethod
    def zeros(cls, shape: Size, **how: Unpack[How]) -> Self: ...
    @classmethod
    def zeros(cls, *size: Any, shape: Any = None, **how: Unpack[How]) -> Self:
        """Makes a tensor of zeros; its space is reserved and nothing is written."""
        return cls._new(size, shape, None, **how)

    @overload
    @classmethod
    def ones(cls, *size: int, **how: Unpack[How]) -> Self: ...
    @overload
    @classmethod
    def ones(cls, shape: Size, **how: Unpack[How]) -> Self: ...
    @classmethod
    def ones(cls, *size: Any, shape: Any = None, **how: Unpack[How]) -> Self:
        """Makes a tensor of ones."""
        return cls._new(size, shape, 1, **how)

    @overload
    @classmethod
    def full(cls, *size: int, fill_value: complex | bool, **how: Unpack[How]) -> Self: ...
    @overload
    @classmethod
    def full(cls, shape: Size, *, fill_value: complex | bool, **how: Unpack[How]) -> Self: ...
    @classmethod
    def full(cls, *size: Any, fill_value: Any, shape: Any = None, **how: Unpack[How]) -> Self:
        """Makes a tensor whose elements are all `fill_value`.

        Its dtype is the default one unless given, also for an integer `fill_value`.
        """
        return cls._new(size, shape, fill_value, **how)

    @classmethod
    def _like(cls, input: torch.Tensor, value: Any, filename: Filename | None) -> Self:
        nested = getattr(input, "is_nested", False)
        shape = input._nested_tensor_size() if nested else tuple(input.shape)
        return cls._new((), shape, value, dtype=input.dtype, filename=filename)

    @classmethod
    def empty_like(cls, input: torch.Tensor, *, filename: Filename | None = None) -> Self:
        """Makes a contiguous tensor with the shape and dtype of `input`; see `empty`."""
        return cls._like(input, None, filename)

    @classmethod
    def zeros_like(cls, input: torch.Tensor, *, filename: Filename | None = None) -> Self:
        """Makes a contiguous tensor of zeros with the shape and dtype of `input`."""
        return cls._like(input, None, filename)

    @classmethod
    def ones_like(cls, input: torch.Tensor, *, filename: Filename | None = None) -> Self:
        """Makes a contiguous tensor of ones with the shape and dtype of `input`."""
        return cls._like(input, 1, filename)

    @classmethod
    def full_like(
        cls,
        input: torch.Tensor,
        fill_value: complex | bool,
        *,
        filename: Filename | None = None,
    ) -> Self:
        """Makes a contiguous tensor of one value with the shape and dtype of `input`."""
        return cls._like(input, fill_value, filename)


def check_device(device: Device) -> None:
    """Refuses all devices but the CPU.

    Raises:
        LayoutError: For another one.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise LayoutError(
            f"a mapped tensor is on the CPU, not on {device}", hint="Use x.to(device) to copy it."
        )
