"""References as JSON: validated, stable, versioned. Reading one opens nothing and runs nothing."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmrpc.core.layout import DTYPES, Layout, contiguous_strides, dtype_name
from mmrpc.core.location import (
    FileIdentity,
    FileLocation,
    Location,
    MemoryLocation,
    Mode,
    MountLocation,
)
from mmrpc.core.nested import NestedLayout
from mmrpc.core.reference import TensorRef
from mmrpc.errors import LayoutError

VERSION: Final = 1
"""Version of the form. Later versions read earlier ones; unknown ones are refused."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Number = Annotated[int, Field(ge=0, lt=2**64)]
_Host = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
_Generation = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]
_Sizes = Annotated[tuple[_Count, ...], Field(max_length=64)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Identity(_Model):
    device: _Number
    inode: _Number
    generation: _Generation

    @classmethod
    def of(cls, identity: FileIdentity) -> _Identity:
        return cls(
            device=identity.device,
            inode=identity.inode,
            generation=identity.generation.hex(),
        )

    def read(self) -> FileIdentity:
        return FileIdentity(self.device, self.inode, bytes.fromhex(self.generation))


class _File(_Model):
    kind: Literal["file"] = "file"
    host: _Host
    path: Annotated[_Text, Field(pattern=r"^/[^\x00]*$")]
    identity: _Identity


class _Memory(_Model):
    kind: Literal["memory"] = "memory"
    host: _Host
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: _Number
    fd: Annotated[int, Field(ge=0, lt=2**31)]
    inode: _Number


class _Mount(_Model):
    kind: Literal["mount"] = "mount"
    mount: _Text
    path: _Text
    host: _Host
    identity: _Identity
    size_bytes: _Count
    content: Annotated[str, Field(max_length=4096)] = ""
    here: Annotated[str, Field(max_length=4096, pattern=r"^(/[^\x00]*)?$")] = ""


class _Dense(_Model):
    kind: Literal["dense"] = "dense"
    dtype: str
    shape: _Sizes
    strides: _Sizes | None = None
    offset_bytes: _Count = 0
    conj: bool = False
    neg: bool = False


class _Nested(_Model):
    kind: Literal["nested"] = "nested"
    dtype: str
    sizes: tuple[_Sizes, ...]
    strides: tuple[_Sizes, ...] | None = None
    offsets: tuple[_Count, ...] | None = None
    offset_bytes: _Count = 0


class _Ref(_Model):
    mmrpc: Literal[1] = 1
    location: Annotated[_File | _Memory | _Mount, Field(discriminator="kind")]
    layout: Annotated[_Dense | _Nested, Field(discriminator="kind")]
    mode: Literal["r", "r+"]


def dump(reference: TensorRef) -> str:
    """Writes a reference; fields that have their default are left out."""
    model = _Ref(
        location=_dump_location(reference.location),
        layout=_dump_layout(reference.layout),
        mode=reference.mode.value,
    )
    fields = model.model_dump(mode="json", exclude_defaults=True)
    fields["location"]["kind"] = model.location.kind
    fields["layout"]["kind"] = model.layout.kind
    return json.dumps({"mmrpc": VERSION, **fields}, separators=(",", ":"))


def _dump_location(location: Location) -> _File | _Memory | _Mount:
    match location:
        case FileLocation(host, path, identity):
            return _File(host=host, path=path, identity=_Identity.of(identity))
        case MemoryLocation(host, pid, started, fd, inode):
            return _Memory(host=host, pid=pid, started=started, fd=fd, inode=inode)
        case MountLocation(mount, path, host, identity, size_bytes, content, here):
            return _Mount(
                mount=mount,
                path=path,
                host=host,
                identity=_Identity.of(identity),
                size_bytes=size_bytes,
                content=content,
                here=here,
            )


def _dump_layout(layout: Layout | NestedLayout) -> _Dense | _Nested:
    name, dense = dtype_name(layout.dtype), layout.is_contiguous
    if isinstance(layout, NestedLayout):
        return _Nested(
            dtype=name,
            sizes=layout.sizes,
            strides=None if dense else layout.strides,
            offsets=None if dense else layout.offsets,
            offset_bytes=layout.offset_bytes,
        )
    return _Dense(
        dtype=name,
        shape=layout.shape,
        strides=None if dense else layout.strides,
        offset_bytes=layout.offset_bytes,
        conj=layout.conj,
        neg=layout.neg,
    )


def load(text: str | bytes) -> TensorRef:
    """Reads a reference.

    Raises:
        LayoutError: If the text is no valid reference, saying where.
    """
    try:
        model = _Ref.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise LayoutError(f"the text is no reference: {where}: {first['msg']}") from None
    return TensorRef(_load_location(model.location), _load_layout(model.layout), Mode(model.mode))


def _load_location(model: _File | _Memory | _Mount) -> Location:
    if isinstance(model, _File):
        return FileLocation(model.host, model.path, model.identity.read())
    if isinstance(model, _Memory):
        return MemoryLocation(model.host, model.pid, model.started, model.fd, model.inode)
    return MountLocation(
        model.mount,
        model.path,
        model.host,
        model.identity.read(),
        model.size_bytes,
        model.content,
        model.here,
    )


def _load_layout(model: _Dense | _Nested) -> Layout | NestedLayout:
    dtype = _dtype(model.dtype)
    if isinstance(model, _Nested):
        if model.strides is None or model.offsets is None:
            return NestedLayout.contiguous(dtype, _rows(model.sizes), model.offset_bytes)
        layout = NestedLayout(dtype, model.sizes, model.strides, model.offsets, model.offset_bytes)
        return layout.check()
    strides = contiguous_strides(model.shape) if model.strides is None else model.strides
    return Layout(dtype, model.shape, strides, model.offset_bytes, model.conj, model.neg).check()


def _rows(sizes: tuple[Any, ...]) -> torch.Tensor:
    if len({len(row) for row in sizes}) > 1:
        raise LayoutError("the rows of a nested shape must have the same length")
    return torch.tensor(sizes, dtype=torch.int64, device="cpu").reshape(len(sizes), -1)


def _dtype(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise LayoutError(f"the text is no reference: unknown dtype {name!r}") from None
