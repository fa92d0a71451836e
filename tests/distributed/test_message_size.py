"""The size of a message does not depend on the size of the tensor."""

from __future__ import annotations

import os
import socket
import stat
import struct
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, rpc
from tests.distributed.workers import run

KIB, GIB = 1 << 10, 1 << 30
BYTES_SENT_OFFSET = 200  # tcpi_bytes_sent in struct tcp_info, since Linux 4.19


def bytes_sent() -> int:
    """What the TCP sockets of this process have sent so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        if len(info) >= BYTES_SENT_OFFSET + 8:
            total += struct.unpack_from("=Q", info, BYTES_SENT_OFFSET)[0]
    return total


def hold(name: str, path: str, nbytes: int) -> None:
    _held[name] = MemoryMappedTensor.from_filename(path, torch.uint8, (nbytes,))


_held: dict[str, torch.Tensor] = {}


def last_byte(x: torch.Tensor) -> int:
    return int(x[-1])


def give(name: str, plain: bool) -> Any:
    return {"x": [_held[name].view(-1) if plain else _held[name]]}


def measure(rank: int, directory: str) -> dict[str, Any]:
    if rank == 1:
        return {}
    paths = {"small": (f"{directory}/a.bin", KIB), "large": (f"{directory}/b.bin", GIB)}
    for name, (path, nbytes) in paths.items():
        with open(path, "wb") as file:
            file.truncate(nbytes)
        rpc.rpc_sync("worker1", hold, (name, path, nbytes))
        hold(name, path, nbytes)
    found: dict[str, Any] = {}
    for name, x in _held.items():
        for kind, argument in (("mapped", x), ("view", x.view(-1))):
            calls = {
                "argument": lambda argument=argument: rpc.rpc_sync(
                    "worker1", last_byte, (argument,)
                ),
                "plain torch": lambda argument=argument: torch.distributed.rpc.rpc_sync(
                    "worker1", last_byte, (argument,)
                ),
            }
            found[name, kind, "serializer"] = rpc.message_nbytes(last_byte, (argument,))
            for what, call in calls.items():
                call()
                before = bytes_sent()
                call()
                found[name, kind, what] = bytes_sent() - before
        for plain in (False, True):
            rpc.rpc_sync("worker1", give, (name, plain))
            before = rpc.rpc_sync("worker1", bytes_sent)
            rpc.rpc_sync("worker1", give, (name, plain))
            found[name, "plain" if plain else "mapped", "result"] = (
                rpc.rpc_sync("worker1", bytes_sent) - before
            )
    found["by value"] = rpc.message_nbytes(last_byte, (torch.zeros(KIB, dtype=torch.uint8),))
    return found


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Bytes of messages with a tensor of 1 KiB and of 1 GiB."""
    # The file of 1 GiB is sparse: it takes no space on the disk.
    return run(measure, 2, str(tmp_path_factory.mktemp("sizes")))[0]


@pytest.mark.parametrize(
    "what",
    [
        *((kind, "serializer") for kind in ("mapped", "view")),
        *((kind, "argument") for kind in ("mapped", "view")),
        *((kind, "plain torch") for kind in ("mapped", "view")),
        *((kind, "result") for kind in ("mapped", "plain")),
    ],
)
def test_a_gibibyte_takes_no_more_bytes_than_a_kibibyte(
    sizes: dict[Any, Any], what: tuple[str, str]
) -> None:
    """At torch's serializer and on the socket, as argument and as result."""
    small, large = sizes["small", *what], sizes["large", *what]
    assert 0 < small < 2048
    assert abs(large - small) < 64


def test_a_plain_tensor_is_counted_with_its_bytes(sizes: dict[Any, Any]) -> None:
    """The measure sees tensors that travel by value."""
    assert sizes["by value"] > KIB
