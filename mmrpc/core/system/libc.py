"""The few calls of the C library that Python does not offer.

All go through `ctypes.CDLL`, which releases the GIL: a page fault or a slow file system in one
thread does not stop the others.
"""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_NORESERVE = 1, 2, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MS_ASYNC, _MS_SYNC = 1, 4
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_STATX_BTIME = 0x800
_RENAME_NOREPLACE = 1
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MAX_HANDLE_BYTES = 128  # MAX_HANDLE_SZ of name_to_handle_at(2)


_FILE_HANDLE = struct.Struct("Ii")  # the head of a struct file_handle: length and kind
_FileHandle = ctypes.c_char * (_FILE_HANDLE.size + _MAX_HANDLE_BYTES)

_PR_GET_DUMPABLE = 3

_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_name_to_handle_at = getattr(_libc, "name_to_handle_at", None)  # not in every C library

ADVICE = {"random": 1, "sequential": 2, "willneed": 3, "dontneed": 4, "hugepage": 14}
"""Names of `madvise(2)` values; not ``MADV_DONTNEED`` on private maps: it drops their writes."""


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def mmap(fd: int, nbytes: int, *, shared: bool) -> int:
    """Maps the first `nbytes` bytes of a descriptor readable and writable; gives the address.

    A private map reserves no memory: it may be larger than RAM, and most is never written.
    """
    flags = _MAP_SHARED if shared else _MAP_PRIVATE | _MAP_NORESERVE
    address = _libc.mmap(None, nbytes, _PROT_READ | _PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        raise _os_error()
    return int(address)


def munmap(address: int, nbytes: int) -> None:
    """Unmaps what `mmap` gave."""
    _libc.munmap(address, nbytes)


def msync(address: int, nbytes: int, *, wait: bool) -> None:
    """Writes changed pages to the file; `address` on a page boundary."""
    if _libc.msync(address, nbytes, _MS_SYNC if wait else _MS_ASYNC):
        raise _os_error()


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Tells the kernel how pages will be used; `address` on a page boundary."""
    if _libc.madvise(address, nbytes, advice):
        raise _os_error()


def is_dumpable() -> bool:
    """Whether other processes of this user may open this one's memory; see prctl(2)."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def file_handle(fd: int) -> bytes | None:
    """The kernel's own name for an inode, generation included; None where there is none.

    See name_to_handle_at(2). Unlike opening by handle, asking for it needs no privilege.
    """
    handle, mount_id = _FileHandle(), ctypes.c_int()
    _FILE_HANDLE.pack_into(handle, 0, _MAX_HANDLE_BYTES, 0)
    if _name_to_handle_at is None or _name_to_handle_at(
        fd, b"", handle, ctypes.byref(mount_id), _AT_EMPTY_PATH
    ):
        return None
    nbytes, _kind = _FILE_HANDLE.unpack_from(handle)
    return handle.raw[_FILE_HANDLE.size :][:nbytes]


def birth_time_ns(fd: int) -> int | None:
    """When the inode was made, in nanoseconds; None where the file system does not tell."""
    buffer = ctypes.create_string_buffer(256)
    try:
        call = _libc.statx
    except AttributeError:
        return None
    if call(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer):
        return None
    (mask,) = struct.unpack_from("I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("qI", buffer, 80)  # stx_btime, see statx(2)
    if not mask & _STATX_BTIME or not seconds:
        return None
    return int(seconds) * 10**9 + int(nanoseconds)


def rename_noreplace(source: str, target: str) -> None:
    """Renames, or fails with EEXIST; for file systems without hard links."""
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target))
    if _libc.renameat2(*arguments, _RENAME_NOREPLACE):
        raise _os_error()


def filesystem_type(fd: int) -> int:
    """The magic number of a descriptor's file system, as in statfs(2)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer):
        raise _os_error()
    return int(struct.unpack_from("l", buffer, 0)[0])


def fallocate(fd: int, start: int, nbytes: int) -> None:
    """Reserves a range of a file that has its size already."""
    _fallocate(fd, 0, start, nbytes)


def punch_hole(fd: int, start: int, nbytes: int) -> None:
    """Gives a range of a file back to the system; it reads as zeros afterwards."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, nbytes)


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    arguments = (fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes))
    if _libc.fallocate(*arguments):
        raise _os_error()
