"""What every mount must do, as a test class that each backend inherits.

    class TestMyStore(MountConformance):
        def make_mount(self, tmp_path): ...
        def put(self, relative, content): ...
        def delete(self, relative): ...

`put` and `delete` reach the store by another way than the code under test. Importable without
pytest; the methods take its ``tmp_path``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmrpc import errors
from mmrpc.core.identity import identify
from mmrpc.core.location import Mode, MountLocation
from mmrpc.paths.access import Policy
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.publishing import publishing, read_manifest
from mmrpc.paths.resolver import ClusterResolver
from mmrpc.paths.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mmrpc.core.mapping import Mapping

ODD_NAMES = ("a b", "ü", "50%", "%2e%2e", "what?", "x#y", "a+b", "a&b=c", "[1]", "*", "~", "-")
_HOSTILE = ("../up", "/etc/passwd", "a/../../b", "a::b", "s3://other/key", "a\0b", "", "a//b")
_LARGE_BYTES = 8 << 20
_DEADLINE_S = 90.0
_ELSEWHERE = "f" * 16


class MountConformance:
    """Tests of one kind of mount: inherit, and say how to make one and how to fill it.

    Attributes:
        names: File names that the store can hold, odd ones among them.
        writable: Whether mmrpc can publish into the mount.
        tells_versions: Whether a change of the same size within a second is noticed.
        proof: What the nodes have proven of the mount.
    """

    names: tuple[str, ...] = ODD_NAMES
    writable: bool = True
    tells_versions: bool = True
    proof: Proof = Proof("data", "nonce", inodes_comparable=True, generations_comparable=True)

    def make_mount(self, tmp_path: Path) -> Mount:
        """Makes an empty mount called ``data``."""
        raise NotImplementedError

    def put(self, relative: str, content: bytes) -> None:
        """Writes a file, replacing an old one as the users of the store do."""
        raise NotImplementedError

    def delete(self, relative: str) -> None:
        """Removes a file."""
        raise NotImplementedError

    def _node(self, tmp_path: Path) -> _Node:
        return _Node(self.make_mount(tmp_path), self.proof, str(tmp_path / "cache"))

    def test_the_bytes_are_those_of_the_store(self, tmp_path: Path) -> None:
        """A reference from another host gives exactly what is there, at any depth and size."""
        node = self._node(tmp_path)
        for relative, content in (
            ("x", b"some bytes"),
            ("a/b/c.bin", os.urandom(_LARGE_BYTES + 1)),
            ("empty", b""),
        ):
            self.put(relative, content)
            assert node.read(node.refer(relative)) == content

    def test_names_are_taken_literally(self, tmp_path: Path) -> None:
        """No name is decoded, globbed or cut."""
        node = self._node(tmp_path)
        for name in self.names:
            self.put(name, name.encode())
        for name in self.names:
            assert node.read(node.refer(name)) == name.encode()

    def test_a_missing_file_is_an_error_and_stays_missing(self, tmp_path: Path) -> None:
        """Reading makes nothing, and the error is also a FileNotFoundError."""
        node = self._node(tmp_path)
        self.put("gone", b"12345678")
        location = node.refer("gone")
        self.delete("gone")
        node.forget()
        for _ in range(2):
            with raises(errors.PathNotFoundError) as caught:
                node.read(location)
            assert caught[0].mount == "data"

    def test_hostile_paths_open_nothing(self, tmp_path: Path) -> None:
        """Whatever a reference says, only files of the mount are opened."""
        node = self._node(tmp_path)
        self.put("x", b"12345678")
        location = node.refer("x")
        for path in _HOSTILE:
            with raises(errors.OutsideMountsError):
                node.read(replace(location, path=path))

    def test_a_changed_file_is_stale(self, tmp_path: Path) -> None:
        """An old reference never gives new content, and what is mapped keeps its bytes."""
        node = self._node(tmp_path)
        self.put("x", b"old bytes")
        old = node.refer("x")
        kept = node.attach(old)
        new_content = b"new bytes" if self.tells_versions else b"other bytes"
        self.put("x", new_content)
        assert _bytes_of(kept) == b"old bytes"
        assert node.read(node.refer("x")) == new_content
        node.forget()
        with raises(errors.StaleReferenceError):
            node.read(old)

    def test_a_file_that_is_too_short_is_an_error(self, tmp_path: Path) -> None:
        """Fewer bytes than the tensor needs are no crash."""
        node = self._node(tmp_path)
        self.put("x", b"1234")
        with raises(errors.FileTooShortError):
            node.attach(node.refer("x"), needed_bytes=5)

    def test_many_processes_get_the_same_file(self, tmp_path: Path) -> None:
        """Processes of one node that start at once all read it whole, from one place."""
        node = self._node(tmp_path)
        content = os.urandom(_LARGE_BYTES)
        self.put("x", content)
        location = node.refer("x")
        with _processes(4, _read_in_child, node, location) as results:
            answers = [results.get(timeout=_DEADLINE_S) for _ in range(4)]
        assert {answer[0] for answer in answers} == {content}
        assert len({answer[1] for answer in answers}) == 1
        assert not node.parts()

    def test_a_killed_reader_harms_nobody(self, tmp_path: Path) -> None:
        """After a process was killed while it read, others read the file whole."""
        node = self._node(tmp_path)
        content = os.urandom(_LARGE_BYTES)
        self.put("x", content)
        location = node.refer("x")
        with _processes(1, _read_when_told, node, location) as results:
            pid = results.get(timeout=_DEADLINE_S)
            _kill_once(lambda: bool(node.parts()), pid)
        assert node.read(location) == content
        self.put("y", b"another")
        assert node.read(node.refer("y")) == b"another"
        assert not node.parts()

    def test_published_files_appear_together(self, tmp_path: Path) -> None:
        """What is published is there with its manifest, or not at all; never twice."""
        if not self.writable:
            return
        node = self._node(tmp_path)
        with raises(ZeroDivisionError), node.publish("v1") as directory:
            _write(f"{directory}/x", b"%d" % (1 // len(os.listdir(directory))))
        with raises(errors.PathNotFoundError):
            node.manifest("v1")
        with node.publish("v1") as directory:
            os.mkdir(f"{directory}/sub")
            _write(f"{directory}/x", b"one")
            _write(f"{directory}/sub/y", b"twenty-two")
            with raises(errors.PathNotFoundError):
                node.manifest("v1")
        manifest = node.manifest("v1")
        assert {n: e.size_bytes for n, e in manifest.files.items()} == {"x": 3, "sub/y": 10}
        location = node.refer("v1/sub/y", content=manifest.files["sub/y"].digest)
        assert node.read(location) == b"twenty-two"
        with raises(errors.PathExistsError), node.publish("v1") as directory:
            _write(f"{directory}/x", b"two")
        assert node.read(node.refer("v1/x")) == b"one"


class _Node:
    """A node that has the mount, and to which all references come from another host."""

    def __init__(self, mount: Mount, proof: Proof, cache_dir: str) -> None:
        self.mount = mount
        self.proof = proof
        self.cache_dir = cache_dir
        self.stage = Stage(cache_dir, node="b")
        self.resolver = ClusterResolver(
            MountTable([mount], node="b"),
            proven={mount.name: proof},
            policy=Policy(visibility_timeout_s=0.5),
            stage=self.stage,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Node, (self.mount, self.proof, self.cache_dir)

    def refer(self, relative: str, content: str | None = None) -> MountLocation:
        """Makes the reference that a node elsewhere would send now."""
        if not self.mount.is_local:
            info = self.stage.remote(self.mount).info(relative)
            identity = identify(0)  # of a copy elsewhere: it means nothing here
            tag = info.tag if content is None else content
            return MountLocation("data", relative, _ELSEWHERE, identity, info.size_bytes, tag)
        fd = os.open(self.mount.local_path(relative), os.O_RDONLY)
        try:
            identity, size_bytes = identify(fd), os.fstat(fd).st_size
        finally:
            os.close(fd)
        return MountLocation("data", relative, _ELSEWHERE, identity, size_bytes, content or "")

    def attach(self, location: MountLocation, needed_bytes: int = 0) -> Mapping:
        return self.resolver.attach(location, Mode.READ, needed_bytes)

    def read(self, location: MountLocation) -> bytes:
        return _bytes_of(self.attach(location, location.size_bytes))

    def forget(self) -> None:
        """Empties the cache, as eviction would."""
        objects = os.path.join(self.cache_dir, "objects")
        if os.path.isdir(objects):
            for name in os.listdir(objects):
                os.unlink(os.path.join(objects, name))

    def parts(self) -> list[str]:
        """Files in the making, in the cache."""
        objects = os.path.join(self.cache_dir, "objects")
        names = os.listdir(objects) if os.path.isdir(objects) else []
        return [name for name in names if name.endswith(".part")]

    def publish(self, relative: str) -> contextlib.AbstractContextManager[str]:
        remote = None if self.mount.is_local else self.stage.remote(self.mount)
        return publishing(self.mount, relative, remote=remote, node="b")

    def manifest(self, relative: str) -> Any:
        remote = None if self.mount.is_local else self.stage.remote(self.mount)
        return read_manifest(self.mount, relative, remote=remote, node="b")


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[list[Any]]:
    """Like `pytest.raises`, for those who have no pytest."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def _bytes_of(mapping: Mapping) -> bytes:
    import ctypes

    return ctypes.string_at(mapping.address, mapping.nbytes) if mapping.nbytes else b""


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _read_in_child(results: Any, node: _Node, location: MountLocation) -> None:
    mapping = node.attach(location)
    path = getattr(mapping, "path", None)
    results.put((_bytes_of(mapping), path))


def _read_when_told(results: Any, node: _Node, location: MountLocation) -> None:
    results.put(os.getpid())
    node.attach(location)
    time.sleep(_DEADLINE_S)


def _kill_once(condition: Callable[[], bool], pid: int) -> None:
    """Kills a process when the condition holds; at the latest after two seconds."""
    deadline = time.monotonic() + 2.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _processes(count: int, function: Callable[..., None], *args: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=function, args=(results, *args), daemon=True) for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield results
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()
        results.close()
        results.join_thread()


__all__ = ["ODD_NAMES", "MountConformance", "raises"]
