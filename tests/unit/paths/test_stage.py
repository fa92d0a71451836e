"""Staged copies: whole, of the right version, within their bound, and told apart."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrpc.errors import (
    ConfigError,
    NoSpaceError,
    OutsideMountsError,
    PathError,
    PathNotFoundError,
    StaleReferenceError,
)
from mmrpc.paths import remote as remote_module
from mmrpc.paths import stage as stage_module
from mmrpc.paths.fstype import FileSystem
from mmrpc.paths.mounts import Mount
from mmrpc.paths.progress import Report
from mmrpc.paths.remote import ObjectInfo, Remote
from mmrpc.paths.stage import Stage, cache_directory

MOUNT = Mount("data", "memory://bucket/prefix")


class Store:
    """Objects in fsspec's memory file system, and how often they were fetched."""

    def __init__(self) -> None:
        fsspec = pytest.importorskip("fsspec")
        self.fs = fsspec.filesystem("memory")
        self.fetched: list[str] = []

    def put(self, relative: str, content: bytes) -> None:
        self.fs.pipe_file(f"/bucket/prefix/{relative}", content)

    def delete(self, relative: str) -> None:
        self.fs.rm_file(f"/bucket/prefix/{relative}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    real = Remote.get

    def get(self: Remote, relative: str, *args: Any) -> None:
        store.fetched.append(relative)
        real(self, relative, *args)

    monkeypatch.setattr(Remote, "get", get)
    yield store
    store.fs.store.clear()
    store.fs.pseudo_dirs[:] = [""]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(str(tmp_path / "cache"), node="b")


def read(stage: Stage, relative: str, mount: Mount = MOUNT, **options: Any) -> bytes:
    fd, _, _ = stage.open(mount, relative, **options)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def path_of(stage: Stage, relative: str, **options: Any) -> str:
    fd, path, _ = stage.open(MOUNT, relative, **options)
    os.close(fd)
    return path


def tag_of(stage: Stage, relative: str) -> str:
    return stage.remote(MOUNT).info(relative).tag


def test_one_download_serves_all(store: Store, stage: Stage) -> None:
    """The second opening, and that of another process's stage, find the file."""
    store.put("x", b"content")
    other = Stage(os.path.dirname(os.path.dirname(path_of(stage, "x"))))
    assert read(stage, "x") == read(other, "x") == b"content"
    assert store.fetched == ["x"]


def test_threads_that_ask_at_once_download_once(store: Store, stage: Stage) -> None:
    """The lock of a name holds threads as it holds processes."""
    store.put("x", b"content")
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(read(stage, "x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"content"] * 8
    assert store.fetched == ["x"]


def test_a_known_version_needs_no_server(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tag of a reference, a staged copy is found without a word from the server."""
    store.put("x", b"content")
    tag = tag_of(stage, "x")
    read(stage, "x")
    monkeypatch.setattr(Remote, "info", lambda *args: pytest.fail("the server was asked"))
    assert read(stage, "x", expected=tag) == b"content"


def test_the_copy_is_private_read_only_and_keeps_its_suffix(store: Store, stage: Stage) -> None:
    """Other users see nothing; nobody writes; formats are recognised by the suffix."""
    store.put("model.safetensors", b"content")
    path = path_of(stage, "model.safetensors")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o444
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert path.endswith(".safetensors")
    store.put("x.json", b"{}")
    assert not path_of(stage, "x.json").endswith(".json")


def test_a_new_version_is_a_new_file(store: Store, stage: Stage) -> None:
    """Who has the old version mapped keeps it; who asks for it by its tag gets it."""
    store.put("x", b"old content")
    tag = tag_of(stage, "x")
    fd, old_path, _ = stage.open(MOUNT, "x")
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        os.close(fd)
        store.put("x", b"new content")
        assert read(stage, "x") == b"new content"
        assert path_of(stage, "x") != old_path
        assert mapped[:] == b"old content"
        assert read(stage, "x", expected=tag) == b"old content"


def test_a_version_that_is_gone_is_stale(store: Store, stage: Stage) -> None:
    """If neither the cache nor the server has the version that was meant, that is the error."""
    store.put("x", b"old content")
    tag = tag_of(stage, "x")
    store.put("x", b"new content")
    with pytest.raises(StaleReferenceError, match="another version") as caught:
        stage.open(MOUNT, "x", expected=tag)
    assert (caught.value.node, caught.value.mount) == ("b", "data")
    assert store.fetched == []


def test_a_digest_is_checked_and_kept(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for by digest has it, and it is computed once."""
    store.put("x", b"content")
    fd, path, origin = stage.open(MOUNT, "x", digest=True)
    os.close(fd)
    assert read(stage, "x", expected=origin.digest) == b"content"
    with pytest.raises(StaleReferenceError, match="content is not"):
        stage.open(MOUNT, "x", expected="sha256:" + 64 * "0")
    monkeypatch.setattr(stage_module, "digest_of", lambda fd: pytest.fail("computed again"))
    assert Stage(os.path.dirname(os.path.dirname(path))).origin_of(path) == origin
    assert read(stage, "x", expected=origin.digest) == b"content"


def test_the_origin_is_known_also_when_the_copy_is_gone(store: Store, stage: Stage) -> None:
    """A tensor on an evicted copy can still be sent: its bytes are those of that version."""
    store.put("a/x", b"content")
    path = path_of(stage, "a/x")
    os.unlink(path)
    os.unlink(path + ".json")
    origin = stage.origin_of(path)
    assert origin is not None
    assert (origin.mount, origin.path, origin.size_bytes) == ("data", "a/x", 7)
    assert stage.origin_of("/elsewhere/x") is None
    assert stage.origin_of(os.path.dirname(path) + "/unknown") is None


def test_a_damaged_copy_is_fetched_again(store: Store, stage: Stage) -> None:
    """A copy that somebody cut is not served."""
    store.put("x", b"content")
    path = path_of(stage, "x")
    os.chmod(path, 0o644)
    os.truncate(path, 3)
    assert read(stage, "x") == b"content"
    os.unlink(path + ".json")
    assert read(stage, "x") == b"content"
    assert store.fetched == ["x"] * 3


def test_an_object_that_changes_under_the_download(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download during which the object changed is not used; it cannot go on for ever."""
    store.put("x", b"first")
    counted = Remote.get
    changes = iter([b"second"])

    def get(self: Remote, relative: str, *args: Any) -> None:
        counted(self, relative, *args)
        change = next(changes, None)
        if change is not None:
            store.put("x", change)

    monkeypatch.setattr(Remote, "get", get)
    assert read(stage, "x") == b"second"
    changes = iter([b"a", b"b", b"c", b"d"])
    store.put("x", b"third")
    with pytest.raises(StaleReferenceError, match="changed during each of 3 downloads"):
        stage.open(MOUNT, "x")
    assert not parts(stage)


def parts(stage: Stage) -> list[str]:
    return [name for name in os.listdir(stage._objects) if name.startswith(".")]


def test_a_failed_download_leaves_nothing(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an error nor an interruption leaves a file of any name."""
    store.put("x", b"content")
    for error in (OSError("lost"), KeyboardInterrupt()):

        def get(self: Remote, relative: str, target: str, *args: Any, error: Any = error) -> None:
            Path(target).write_bytes(b"con")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Remote, "get", get)
            with pytest.raises((OSError, KeyboardInterrupt)):
                stage.open(MOUNT, "x")
        assert os.listdir(stage._objects) == []
    assert read(stage, "x") == b"content"


def test_a_short_download_is_not_used(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends early without an error is noticed by the size."""
    store.put("x", b"content")
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "get", lambda self, r, target, *a: Path(target).write_bytes(b"con"))
        with pytest.raises(StaleReferenceError):
            stage.open(MOUNT, "x")
    assert read(stage, "x") == b"content"


def test_a_server_that_tells_no_version(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without version, ETag or time a copy could be out of date, unless nothing ever changes."""
    store.put("x", b"content")
    monkeypatch.setattr(Remote, "info", lambda *args: ObjectInfo(7, ""))
    with pytest.raises(StaleReferenceError, match="neither a version, an ETag nor a time"):
        stage.open(MOUNT, "x")
    assert read(stage, "x", Mount("data", MOUNT.root, immutable=True)) == b"content"


def test_what_is_missing_or_hostile(store: Store, stage: Stage) -> None:
    """A missing object is named by its URL; a hostile path reaches no server."""
    with pytest.raises(PathNotFoundError, match="memory://bucket/prefix/missing"):
        stage.open(MOUNT, "missing")
    with pytest.raises(OutsideMountsError):
        stage.open(MOUNT, "../secret")


def test_old_copies_make_room(store: Store, tmp_path: Path) -> None:
    """Within the bound, what was used last stays, and a mapped copy keeps its bytes."""
    stage = Stage(str(tmp_path / "cache"), limit_bytes=25)
    for name in "abc":
        store.put(name, name.encode() * 10)
    first = path_of(stage, "a")
    second = path_of(stage, "b")
    os.utime(first + ".json", ns=(2, 2))
    os.utime(second + ".json", ns=(1, 1))
    fd, _, _ = stage.open(MOUNT, "b")
    os.utime(second + ".json", ns=(1, 1))
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        os.close(fd)
        path_of(stage, "c")
        assert os.path.exists(first)
        assert not os.path.exists(second)
        assert not os.path.exists(second + ".json")
        assert mapped[:] == b"b" * 10
    assert read(stage, "b") == b"b" * 10


def test_using_a_copy_keeps_it(store: Store, tmp_path: Path) -> None:
    """Each opening makes a copy the last used one."""
    stage = Stage(str(tmp_path / "cache"), limit_bytes=25)
    for name in "abc":
        store.put(name, name.encode() * 10)
    paths = [path_of(stage, "a"), path_of(stage, "b")]
    for path in paths:
        os.utime(path + ".json", ns=(1, 1))
    path_of(stage, "a")
    path_of(stage, "c")
    assert [os.path.exists(path) for path in paths] == [True, False]


def test_what_cannot_fit_is_refused_first(store: Store, tmp_path: Path) -> None:
    """An object beyond the bound is an error with numbers, before a byte is fetched."""
    stage = Stage(str(tmp_path / "cache"), limit_bytes=10, node="b")
    store.put("small", b"12345")
    kept = path_of(stage, "small")
    store.put("large", b"12345678901")
    with pytest.raises(NoSpaceError, match="cache_bytes") as caught:
        stage.open(MOUNT, "large")
    assert caught.value.needed_bytes == 11
    assert store.fetched == ["small"]
    assert os.path.exists(kept)


def test_parts_of_the_dead_are_swept(store: Store, stage: Stage) -> None:
    """A download that nobody will finish goes with the next one; a living one's stays."""
    from mmrpc.core import sweep
    from mmrpc.core.system import host

    store.put("x", b"content")
    path = path_of(stage, "x")
    living = sweep.part_name(path)
    dead = living.replace(f"-{os.getpid()}-{host.own_start_time()}-", "-1-99999999999-")
    for part in (living, dead):
        Path(part).write_bytes(b"part")
    store.put("y", b"another")
    path_of(stage, "y")
    assert os.path.exists(living)
    assert not os.path.exists(dead)


def test_notes_without_a_file_are_swept(store: Store, stage: Stage) -> None:
    """What a killed download noted goes in a day; a note that is just being made stays."""
    store.put("x", b"content")
    objects = Path(path_of(stage, "x")).parent
    for name in ("old.json", "new.json"):
        (objects / name).write_text("{}")
    os.utime(objects / "old.json", (1, 1))
    store.put("y", b"another")
    path_of(stage, "y")
    assert not (objects / "old.json").exists()
    assert (objects / "new.json").exists()
    assert len(os.listdir(objects)) == 5


def test_two_services_with_one_bucket_and_key_are_told_apart(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a copy depends on the mount, its root and the service behind it."""
    stage = Stage(str(tmp_path / "cache"))
    store.put("x", b"content")
    names = {stage._name(Remote(MOUNT), "x", "etag:1")}
    names.add(stage._name(Remote(Mount("other", MOUNT.root)), "x", "etag:1"))
    names.add(stage._name(Remote(Mount("data", "memory://other")), "x", "etag:1"))
    names.add(stage._name(Remote(MOUNT), "y", "etag:1"))
    names.add(stage._name(Remote(MOUNT), "x", "etag:2"))
    monkeypatch.setattr(Remote, "endpoint", "http://another")
    names.add(stage._name(Remote(MOUNT), "x", "etag:1"))
    assert len(names) == 6


def test_long_downloads_are_reported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked hears how far a download is."""
    reports: list[Report] = []
    times = iter(range(0, 10_000, 10))
    monkeypatch.setattr("mmrpc.paths.progress.time.monotonic", lambda: next(times))
    stage = Stage(str(tmp_path / "cache"), report=reports.append)
    store.put("x", bytes(1 << 20))
    path_of(stage, "x")
    assert reports
    assert (reports[-1].mount, reports[-1].path, reports[-1].total_bytes) == ("data", "x", 1 << 20)


def test_the_cache_is_on_a_disk_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's cache is the default, and a network file system is a mistake in the config."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(None) == str(tmp_path / "mmrpc")
    assert cache_directory("/x") == "/x"
    network = FileSystem("nfs4", "server:/export", "/srv", False)
    monkeypatch.setattr(stage_module, "file_system_of", lambda path: network)
    with pytest.raises(ConfigError, match="nfs4") as caught:
        cache_directory("/srv/cache", "b")
    assert caught.value.key == "nodes.b.cache_dir"


def test_foreign_errors_are_ours_and_tell_no_secret(
    store: Store, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an implementation raises is a PathError, without the text of the foreign one."""
    fs = stage.remote(MOUNT)._fs
    for error, kind in (
        (RuntimeError("https://x/?Signature=hidden"), PathError),
        (PermissionError("hidden"), PermissionError),
        (OSError(28, "hidden"), NoSpaceError),
    ):

        def info(path: str, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(fs, "info", info)
        with pytest.raises(PathError) as caught:
            stage.open(MOUNT, "x")
        assert isinstance(caught.value, kind)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        ({"VersionId": "v1", "ETag": '"abc"'}, "version:v1"),
        ({"VersionId": "null", "ETag": '"abc"'}, "etag:abc"),
        ({"VersionId": None, "etag": "abc", "LastModified": "x"}, "etag:abc"),
        ({"Content-MD5": "abc"}, "checksum:abc"),
        ({"Last-Modified": "Mon, 30 Nov 2026", "size": 5}, "time:Mon, 30 Nov 2026:5"),
        ({"size": 5}, ""),
    ],
)
def test_the_strongest_word_of_a_server_counts(info: dict[str, Any], tag: str) -> None:
    """A version says more than an ETag, that more than a time."""
    assert remote_module._tag(info) == tag
