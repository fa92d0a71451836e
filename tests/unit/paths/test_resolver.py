"""References in a cluster: what is sent for a file, and what is mapped for what came."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrpc import MemoryMappedTensor, TensorRef
from mmrpc.core.location import FileLocation, MemoryLocation, MountLocation
from mmrpc.core.resolver import set_resolver
from mmrpc.core.system import libc
from mmrpc.core.system.host import host_id
from mmrpc.errors import (
    ConfigError,
    FileTooShortError,
    LayoutError,
    MountTimeoutError,
    NotRegularFileError,
    NotSharedError,
    OutsideMountsError,
    PathError,
    PathNotFoundError,
    PathNotWritableError,
    StaleReferenceError,
)
from mmrpc.paths import access
from mmrpc.paths.access import Policy
from mmrpc.paths.fstype import FileSystem
from mmrpc.paths.locating import destination
from mmrpc.paths.mounts import Mount, MountTable
from mmrpc.paths.proof import Proof
from mmrpc.paths.resolver import ClusterResolver

from .test_relative import HOSTILE

ELSEWHERE = "0123456789abcdef"
NONCE = Proof("data", "nonce")
SAME_INODES = Proof("data", "nonce", inodes_comparable=True)
SAME_FILES = Proof("data", "nonce", inodes_comparable=True, generations_comparable=True)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = set_resolver(None)
    yield
    set_resolver(before)


def install(root: Path, proof: Proof | None = SAME_FILES, **mount: Any) -> ClusterResolver:
    """Makes this process a node that has one mount."""
    policy = Policy(
        verify=mount.pop("verify", "stat"),
        same_host_paths=mount.pop("same_host_paths", True),
        mount_timeout_s=mount.pop("mount_timeout_s", 10.0),
        visibility_timeout_s=mount.pop("visibility_timeout_s", 0.2),
    )
    resolver = ClusterResolver(
        MountTable([Mount("data", str(root), **mount)], node="b"),
        proven={} if proof is None else {"data": proof},
        policy=policy,
    )
    set_resolver(resolver)
    return resolver


def tensor_in(root: Path, name: str = "x", size: int = 4) -> MemoryMappedTensor:
    return MemoryMappedTensor.from_tensor(torch.arange(float(size)), filename=root / name)


def place(ref: TensorRef) -> MountLocation:
    assert isinstance(ref.location, MountLocation)
    return ref.location


def moved(ref: TensorRef, **changes: Any) -> TensorRef:
    """The reference with another location, as if it came from another host by default."""
    return replace(ref, location=replace(place(ref), **{"host": ELSEWHERE, **changes}))


@contextlib.contextmanager
def sending_to(host: str) -> Iterator[None]:
    before = destination.set(host)
    yield
    destination.reset(before)


class TestLocate:
    def test_a_file_in_a_mount_is_sent_by_name(self, root: Path) -> None:
        """What travels is mount and relative path, not the path of this node."""
        install(root)
        location = place(tensor_in(root / "sub").ref())
        assert (location.mount, location.path) == ("data", "sub/x")
        assert (location.host, location.size_bytes, location.content) == (host_id(), 16, "")
        assert location.here == str(root / "sub" / "x")
        with sending_to(ELSEWHERE):
            assert str(root) not in repr(tensor_in(root, "y").ref())

    def test_links_are_resolved_by_the_sender(self, root: Path, tmp_path: Path) -> None:
        """However the file was opened, the place that is sent has no link in it."""
        tensor_in(root / "sub")
        (tmp_path / "alias").symlink_to(root)
        (root / "current").symlink_to("sub")
        install(tmp_path / "alias")
        for path in ("alias/sub/x", "mount/sub/x", "alias/current/x", "mount/current/x"):
            opened = MemoryMappedTensor.from_filename(tmp_path / path, torch.float32, (4,))
            assert place(opened.ref()).path == "sub/x"

    def test_what_is_outside_stays_on_its_host(self, root: Path, tmp_path: Path) -> None:
        """Files elsewhere, links out of the mount and anonymous memory go by their host."""
        install(root)
        assert isinstance(tensor_in(tmp_path).ref().location, FileLocation)
        assert isinstance(MemoryMappedTensor.zeros(3).ref().location, MemoryLocation)
        (root / "out").symlink_to(tmp_path)
        opened = MemoryMappedTensor.from_filename(root / "out" / "x", torch.float32, (4,))
        assert isinstance(opened.ref().location, FileLocation)

    def test_a_replaced_or_deleted_file_is_not_sent(self, root: Path) -> None:
        """A reference never names a file that is not the one that is mapped."""
        install(root)
        tensor = tensor_in(root)
        os.rename(root / "x", root / "y")
        with pytest.raises(PathNotFoundError):
            tensor.ref()
        (root / "x").write_bytes(b"another")
        with pytest.raises(StaleReferenceError, match="another file"):
            tensor.ref()

    def test_what_was_written_is_flushed_unless_it_stays_here(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before a reference leaves, writes reach the file system; on this host they need not."""
        flushed: list[int] = []
        monkeypatch.setattr(libc, "msync", lambda address, nbytes, wait: flushed.append(nbytes))
        install(root)
        tensor = tensor_in(root)
        tensor.ref()
        assert flushed == [16]
        with sending_to(ELSEWHERE):
            tensor.ref()
        assert flushed == [16, 16]
        with sending_to(host_id()):
            tensor.ref()
        MemoryMappedTensor.from_filename(root / "x", torch.float32, (4,), mode="r").ref()
        assert flushed == [16, 16]


class TestSameHost:
    def test_the_same_bytes_come_out(self, root: Path) -> None:
        """A reference opens to the sender's own memory, whichever path this node has."""
        install(root)
        tensor = tensor_in(root)
        opened = tensor.ref().open()
        opened[0] = 7
        assert tensor[0] == 7

    def test_no_proof_is_needed(self, root: Path) -> None:
        """On one host, identity alone decides."""
        install(root, proof=None)
        assert torch.equal(tensor_in(root).ref().open(), torch.arange(4.0))

    def test_a_process_without_mounts_finds_it_by_its_path(self, root: Path) -> None:
        """A child that knows no config, such as a DataLoader's worker, opens the same file."""
        install(root)
        tensor = tensor_in(root)
        ref, elsewhere = tensor.ref(), moved(tensor.ref())
        set_resolver(None)
        opened = TensorRef.from_json(ref.to_json()).open()
        opened[0] = 7
        assert tensor[0] == 7
        with pytest.raises(ConfigError, match="knows no mounts"):
            elsewhere.open()
        os.unlink(root / "x")
        tensor_in(root)
        with pytest.raises(StaleReferenceError):
            ref.open()

    def test_another_file_of_that_name_is_stale(self, root: Path) -> None:
        """Same name and size do not make it the same file, nor does a reused inode."""
        install(root)
        ref = tensor_in(root).ref()
        for _ in range(20):
            os.unlink(root / "x")
            tensor_in(root)
            with pytest.raises(StaleReferenceError) as caught:
                ref.open()
        assert (caught.value.node, caught.value.mount) == ("b", "data")

    def test_outside_the_mounts_is_a_matter_of_policy(self, root: Path, tmp_path: Path) -> None:
        """Paths of the same host open by default, and can be confined to the mounts."""
        outside, inside = tensor_in(tmp_path), tensor_in(root)
        refs = outside.ref(), inside.ref()
        install(root)
        assert [len(ref.open()) for ref in refs] == [4, 4]
        install(root, same_host_paths=False)
        assert len(refs[1].open()) == 4
        with pytest.raises(OutsideMountsError, match="in no mount of this node"):
            refs[0].open()


class TestOtherHost:
    def test_a_proven_mount_gives_the_file(self, root: Path) -> None:
        """Where the mount is proven, the relative path is opened in this node's own place."""
        install(root)
        ref = moved(tensor_in(root).ref())
        assert torch.equal(ref.open(), torch.arange(4.0))
        assert ref.open("r").untyped_storage().data_ptr() != ref.open().untyped_storage().data_ptr()

    def test_an_unproven_mount_is_refused(self, root: Path) -> None:
        """A path that looks right proves nothing, unless the config says so."""
        install(root, proof=None)
        ref = moved(tensor_in(root).ref())
        with pytest.raises(NotSharedError, match="nothing proves"):
            ref.open()
        install(root, proof=None, trust="declared")
        assert len(ref.open()) == 4

    def test_a_mount_that_this_node_lacks(self, root: Path) -> None:
        """The error names the line of the config that would help."""
        install(root)
        ref = moved(tensor_in(root).ref(), mount="other")
        with pytest.raises(NotSharedError, match=r"nodes\.b\.mounts\.other"):
            ref.open()

    def test_a_file_outside_the_mounts_names_one_that_would_do(
        self, root: Path, tmp_path: Path
    ) -> None:
        """Refusing, the node says which mount the sender could have used."""
        install(root)
        ref = tensor_in(tmp_path).ref()
        ref = replace(ref, location=replace(ref.location, host=ELSEWHERE))  # type: ignore[arg-type]
        with pytest.raises(NotSharedError, match=f"mount 'data', which is '{root}'"):
            ref.open()
        anonymous = MemoryMappedTensor.zeros(2)
        ref = anonymous.ref()
        ref = replace(ref, location=replace(ref.location, host=ELSEWHERE))  # type: ignore[arg-type]
        with pytest.raises(NotSharedError, match="another host"):
            ref.open()

    def test_what_is_compared_follows_from_the_proof(self, root: Path) -> None:
        """Inode and generation count where the handshake saw that they mean the same."""
        ref = tensor_in(root).ref()
        install(root)
        ref = tensor_in(root, "y").ref()
        identity = place(ref).identity
        other_inode = moved(ref, identity=identity._replace(inode=identity.inode + 1))
        other_file = moved(ref, identity=identity._replace(generation=b"hother"))
        for proof, stale in ((NONCE, []), (SAME_INODES, [0]), (SAME_FILES, [0, 1])):
            install(root, proof)
            for index, changed in enumerate((other_inode, other_file)):
                if index in stale:
                    with pytest.raises(StaleReferenceError):
                        changed.open()
                else:
                    assert len(changed.open()) == 4

    def test_the_size_must_be_that_of_the_sender(self, root: Path) -> None:
        """A file of another size is another version, unless nothing is to be verified."""
        install(root, NONCE)
        ref = moved(tensor_in(root).ref(), size_bytes=99)
        with pytest.raises(StaleReferenceError, match="16 bytes, and 99 were meant"):
            ref.open()
        install(root, NONCE, verify="none")
        assert len(ref.open()) == 4

    def test_digests_find_what_sizes_do_not(self, root: Path) -> None:
        """With verify: digest, other content of the same size is stale."""
        install(root, NONCE, verify="digest")
        tensor = tensor_in(root)
        ref = moved(tensor.ref())
        assert place(ref).content.startswith("sha256:")
        assert len(ref.open()) == 4
        tensor[0] = 9
        with pytest.raises(StaleReferenceError, match="content"):
            ref.open()

    def test_a_short_file_is_no_crash(self, root: Path) -> None:
        """A file that was cut gives both sizes, and stays as it is."""
        install(root, NONCE, verify="none")
        ref = moved(tensor_in(root, size=4096).ref())
        os.truncate(root / "x", 5)
        with pytest.raises(FileTooShortError) as caught:
            ref.open()
        assert (caught.value.needed_bytes, caught.value.actual_bytes) == (16384, 5)
        assert (root / "x").stat().st_size == 5

    def test_a_missing_file_is_not_made(self, root: Path) -> None:
        """On a local file system nothing can be late, so nobody waits."""
        install(root, visibility_timeout_s=3600)
        ref = moved(tensor_in(root).ref())
        os.unlink(root / "x")
        with pytest.raises(PathNotFoundError):
            ref.open()
        assert not (root / "x").exists()

    def test_a_late_file_is_waited_for(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a network file system, a name that is missing at first is looked for again."""
        monkeypatch.setattr(
            access, "file_system_of", lambda path: FileSystem("nfs4", "s:/", "/", False)
        )
        install(root, visibility_timeout_s=60)
        ref = moved(tensor_in(root).ref())
        os.rename(root / "x", root / "hidden")
        looked = threading.Event()
        real = access.open_beneath

        def open_beneath(*args: Any, **kwargs: Any) -> int:
            try:
                return real(*args, **kwargs)
            finally:
                looked.set()

        def show() -> None:
            looked.wait()
            os.rename(root / "hidden", root / "x")

        monkeypatch.setattr(access, "open_beneath", open_beneath)
        thread = threading.Thread(target=show)
        thread.start()
        assert len(ref.open()) == 4
        thread.join()

    def test_a_mount_that_does_not_answer(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A dead server is an error at the deadline, and other threads run on."""
        monkeypatch.setattr(
            access, "file_system_of", lambda path: FileSystem("nfs4", "s:/", "/", False)
        )
        install(root, mount_timeout_s=0.1)
        ref = moved(tensor_in(root).ref())
        answer = threading.Event()
        real = access.open_beneath

        def hang(*args: Any, **kwargs: Any) -> int:
            answer.wait()
            return real(*args, **kwargs)

        monkeypatch.setattr(access, "open_beneath", hang)
        fds = len(os.listdir("/proc/self/fd"))
        try:
            with pytest.raises(MountTimeoutError) as caught:
                ref.open()
            with pytest.raises(MountTimeoutError, match="earlier call"):
                ref.open()
        finally:
            answer.set()
        assert (caught.value.mount, caught.value.timeout_s) == ("data", 0.1)
        for thread in threading.enumerate():
            if thread.name == "mmrpc-deadline":
                thread.join(30)
        assert len(os.listdir("/proc/self/fd")) == fds

    @pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h["why"])
    @pytest.mark.parametrize("host", [ELSEWHERE, None], ids=["other host", "same host"])
    def test_hostile_references_open_nothing(
        self, root: Path, hostile: dict[str, str], host: str | None
    ) -> None:
        """Whatever the text of a reference, the node opens nothing outside its mount."""
        install(root, NONCE, verify="none")
        ref = moved(tensor_in(root).ref(), path=hostile["path"], host=host or host_id())
        with pytest.raises(OutsideMountsError) as caught:
            ref.open()
        assert (caught.value.node, caught.value.mount) == ("b", "data")

    @pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: h["why"])
    def test_hostile_text_in_json_opens_nothing(self, root: Path, hostile: dict[str, str]) -> None:
        """A reference that came as JSON is refused when it is read or when it is opened."""
        install(root, NONCE, verify="none")
        tree = json.loads(moved(tensor_in(root).ref(), path="PLACE").to_json())
        text = json.dumps(tree).replace('"PLACE"', json.dumps(hostile["path"]))
        assert text != json.dumps(tree)
        with pytest.raises((OutsideMountsError, LayoutError)):
            TensorRef.from_json(text).open()

    @pytest.mark.parametrize("host", [ELSEWHERE, None], ids=["other host", "same host"])
    def test_hostile_files_are_refused(self, root: Path, host: str | None) -> None:
        """Links out, devices and FIFOs in a mount are errors of their own kind."""
        install(root, NONCE, verify="none")
        ref = moved(tensor_in(root).ref(), host=host or host_id())
        (root / "link").symlink_to(root.parent / "secret")
        (root / "fd").symlink_to("/proc/self/fd/0")
        (root / "up").symlink_to("..")
        os.mkfifo(root / "fifo")
        for path, error in (
            ("link", OutsideMountsError),
            ("fd", OutsideMountsError),
            ("up/secret", OutsideMountsError),
            ("fifo", NotRegularFileError),
            ("sub", NotRegularFileError),
        ):
            with pytest.raises(error):
                moved(ref, path=path, host=place(ref).host).open()


class TestReaders:
    def test_copy_is_a_copy(self, root: Path) -> None:
        """Read by copy, the tensor keeps its bytes whatever happens to the file."""
        install(root, reader="copy")
        tensor = tensor_in(root)
        opened = tensor.ref().open("r")
        tensor[0] = 9
        os.truncate(root / "x", 0)
        assert opened.tolist() == [0, 1, 2, 3]

    def test_a_copy_shows_what_the_sender_sees_now(self, root: Path) -> None:
        """Each opening reads afresh: a copy that is kept would be out of date."""
        install(root, reader="copy")
        tensor = tensor_in(root)
        ref = tensor.ref()
        first = ref.open("r")
        tensor[0] = 9
        assert (first[0].item(), ref.open("r")[0].item()) == (0, 9)

    def test_a_copy_can_be_sent_on(self, root: Path) -> None:
        """What was read by copy is still a reference to its file."""
        install(root, reader="copy")
        opened = tensor_in(root).ref().open("r")
        assert place(opened.ref()).path == "x"
        opened[0] = 5
        with pytest.raises(NotSharedError, match="this process only"):
            opened.ref()

    def test_shared_writes_need_a_mapping(self, root: Path) -> None:
        """A copy that pretended to share writes would lose them."""
        install(root, reader="copy")
        with pytest.raises(PathNotWritableError, match="reads the mount by copy"):
            tensor_in(root).ref().open("r+")

    def test_prefetch_reads_ahead_once(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first opening asks the kernel for the file; later ones find it mapped."""
        advised: list[int] = []
        monkeypatch.setattr(libc, "madvise", lambda a, n, advice: advised.append(advice))
        install(root, reader="prefetch")
        ref = tensor_in(root).ref()
        kept = ref.open("r")
        assert torch.equal(ref.open("r"), kept)
        assert advised == [libc.ADVICE["willneed"]]

    def test_empty_tensors_have_nothing_to_read(self, root: Path) -> None:
        """A file of no bytes opens with every reader."""
        for reader in ("mmap", "prefetch", "copy"):
            install(root, reader=reader)
            tensor = tensor_in(root, f"empty-{reader}", 0)
            assert tensor.ref().open("r").shape == (0,)


def test_one_mapping_serves_many_openings(root: Path) -> None:
    """Opening again costs no address space and no descriptor, from either side."""
    install(root)
    tensor = tensor_in(root)
    here, there = tensor.ref(), moved(tensor.ref())
    fds = len(os.listdir("/proc/self/fd"))
    opened = [ref.open() for _ in range(50) for ref in (here, there)]
    assert len({t.untyped_storage().data_ptr() for t in opened}) == 1
    assert len(os.listdir("/proc/self/fd")) == fds


def test_errors_travel_whole(root: Path) -> None:
    """What a node raises is the same after pickling, attributes included."""
    import pickle

    install(root)
    ref = moved(tensor_in(root).ref(), mount="other")
    with pytest.raises(PathError) as caught:
        ref.open()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    assert copy.mount == "other"
