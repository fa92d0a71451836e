"""Beside an object store: what another process on this machine gets to see, and how soon."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

import mmrpc.rpc as rpc
from benchmarks.harness import Line
from benchmarks.lines.callee import gather, gather_kept, keep, nothing, total
from benchmarks.lines.peers import peer
from benchmarks.lines.places import Places
from benchmarks.lines.values import one_shot
from mmrpc import MemoryMappedTensor


def lines(places: Places) -> Iterator[Line]:
    """Lines beside Ray, whose processes run while these are measured and no longer."""
    with RayProcess() as ray:
        yield _once(places, ray, 64 if places.quick else 256)
        yield _rows(places, ray)
        yield _call(ray)


class RayProcess:
    """A Ray instance on this machine with one actor, or nothing if Ray is not installed."""

    def __enter__(self) -> RayProcess:
        self.module: Any = None
        self._directory = ""
        peer("ray", self._start)
        return self

    def _start(self, ray: Any) -> dict[str, Any]:
        # Nothing is written to the user's home directory, and nothing is sent to anybody.
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        # Its sockets are in there, and a socket's path is short.
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        ray.init(
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2 << 30,
            _temp_dir=self._directory,
        )
        threads = torch.get_num_threads()

        class Reader:
            def __init__(self) -> None:
                torch.set_num_threads(threads)

            def nothing(self, x: object) -> None:
                pass

            def total(self, x: Any) -> float:
                return float(torch.as_tensor(x).sum())

            def gather(self, x: Any, rows: Any) -> int:
                return int(torch.from_numpy(x)[rows].sum())

        self.module = ray
        self.reader = ray.remote(Reader).remote()
        ray.get(self.reader.nothing.remote(0))
        return {}

    def __exit__(self, *exception: object) -> None:
        if self.module:
            self.module.shutdown()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def ways(self, make: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        """Alternatives that use Ray's module and the actor, or none."""
        return make(self.module, self.reader) if self.module else {}


def _once(places: Places, ray: RayProcess, mib: int) -> Line:
    line = one_shot(mib)
    line.asked, line.summary = 1.2, "a plain tensor to another process, read once"
    x = torch.ones(mib << 18)
    array = x.numpy()

    def put(module: Any, reader: Any) -> dict[str, Any]:
        def run(value: Any) -> None:
            # No name is kept, so that the store can use the memory again.
            module.get(reader.total.remote(module.put(value)))

        return {"Ray, NumPy": lambda: run(array), "Ray, tensor": lambda: run(x)}

    def theirs(module: Any) -> dict[str, Any]:
        def run() -> None:
            path = places.fresh(places.memory)
            y = module.MemoryMappedTensor.from_tensor(x, filename=path)
            torch_rpc.rpc_sync("worker1", total, (y,))
            os.unlink(path)

        return {"tensordict": run}

    line.alternatives |= {**peer("tensordict", theirs), **ray.ways(put)}
    return line


def _rows(places: Places, ray: RayProcess) -> Line:
    images = torch.randint(0, 255, (20_000, 3, 32, 32), dtype=torch.uint8)
    x = MemoryMappedTensor.from_tensor(images, filename=places.fresh(places.memory))
    rows = torch.randint(0, len(images), (4096,))
    torch_rpc.rpc_sync("worker1", keep, (x.filename, tuple(x.shape), x.dtype))

    def shared(module: Any, reader: Any) -> dict[str, Any]:
        reference = module.put(images.numpy())
        indices = rows.numpy()
        return {"Ray, NumPy": lambda: module.get(reader.gather.remote(reference, indices))}

    def theirs(module: Any) -> dict[str, Any]:
        y = module.MemoryMappedTensor.from_filename(x.filename, x.dtype, x.shape)
        return {"tensordict": lambda: torch_rpc.rpc_sync("worker1", gather, (y, rows))}

    return Line(
        "another process reads 4,096 random rows of a shared dataset of 60 MB",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", gather, (x, rows)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", gather_kept, (x.filename, rows)),
            **peer("tensordict", theirs),
            **ray.ways(shared),
        },
        calls=3,
        how_limit="index_select on a mapping that was kept, the rows by torch's RPC",
    )


def _call(ray: RayProcess) -> Line:
    text = "a" * 40

    def call(module: Any, reader: Any) -> dict[str, Any]:
        return {"Ray": lambda: module.get(reader.nothing.remote(text))}

    return Line(
        "a call with a short string",
        {
            "mmrpc": lambda: rpc.rpc_sync("worker1", nothing, (text,)),
            "limit": lambda: torch_rpc.rpc_sync("worker1", nothing, (text,)),
            **ray.ways(call),
        },
        calls=100,
        how_limit="torch's RPC",
    )
