"""The limits: the least that has to be done, by hand, without checks, names or errors."""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

from mmrpc.core.system import libc


def map_tensor(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Opens, maps and wraps a file; unmapped when the tensor dies."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    address = libc.mmap(fd, nbytes, shared=True)
    os.close(fd)
    return over(address, nbytes, shape, dtype)


def over(address: int, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Wraps mapped memory, and unmaps it with the tensor."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, nbytes).atexit = False
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def write_tensor(path: str, source: torch.Tensor, *, reserve: bool) -> torch.Tensor:
    """Writes a contiguous tensor to a new file and maps it."""
    nbytes = source.numel() * source.itemsize
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    if reserve:
        os.posix_fallocate(fd, 0, nbytes)
    data = memoryview((ctypes.c_char * nbytes).from_address(source.data_ptr())).cast("B")
    done = 0
    while done < nbytes:
        done += os.pwrite(fd, data[done : done + (1 << 30)], done)
    address = libc.mmap(fd, nbytes, shared=True)
    os.close(fd)
    return over(address, nbytes, tuple(source.shape), source.dtype)


class Thin(torch.Tensor):
    """The thinnest subclass whose views keep their class."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, index: object) -> torch.Tensor:
        out = torch.Tensor.__getitem__(self, index)
        out.__class__ = Thin
        return out
