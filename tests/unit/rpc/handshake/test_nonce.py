"""Files that prove a mount: made once, read by others, and gone afterwards."""

from __future__ import annotations

import os
import tempfile
import time

import pytest

from mmrpc.core.system import host
from mmrpc.errors import NotRegularFileError, NotSharedError, PathError, PathNotWritableError
from mmrpc.paths.mounts import Mount
from mmrpc.rpc.handshake import nonce
from tests.needs import needs


@pytest.fixture
def mount(tmp_path):
    return Mount("data", str(tmp_path), "write")


def test_what_was_written_is_read(mount):
    """Another node that has the directory reads the same file, and knows that it is it."""
    written = nonce.write(mount, "a")
    mark = nonce.read(mount, written, "b", visible_s=0)
    assert mark == written.mark
    assert mark.inode == os.stat(mount.local_path(written.name)).st_ino
    nonce.remove(mount, written, "a")
    nonce.remove(mount, written, "a")
    assert os.listdir(mount.root) == []


def test_others_may_read_it_whatever_the_umask(mount):
    """A node that runs as another user can read the proof."""
    old = os.umask(0o077)
    try:
        written = nonce.write(mount, "a")
    finally:
        os.umask(old)
    assert os.stat(mount.local_path(written.name)).st_mode & 0o777 == 0o644


def test_a_file_that_comes_late_is_waited_for(mount, monkeypatch):
    """A file that another host's directory shows late is found once it is there."""
    written = nonce.write(mount, "a")
    path = mount.local_path(written.name)
    os.rename(path, f"{path}.later")
    listed = []

    def listdir(directory):
        listed.append(directory)
        os.rename(f"{path}.later", path)
        return []

    monkeypatch.setattr(nonce.os, "listdir", listdir)
    assert nonce.read(mount, written, "b", visible_s=30).inode == written.mark.inode
    assert listed == [mount.root]


@pytest.mark.parametrize("kind", ["absent", "other", "empty"])
def test_another_directory_is_told(mount, kind):
    """A missing nonce, or a file of its name with other content, is another directory."""
    written = nonce.write(mount, "a")
    path = mount.local_path(written.name)
    if kind == "absent":
        os.unlink(path)
    else:
        with open(path, "w") as file:
            file.write("x" if kind == "other" else "")
    with pytest.raises(NotSharedError, match="not the directory that a has") as caught:
        nonce.read(mount, written, "b", visible_s=0)
    assert (caught.value.node, caught.value.mount, caught.value.path) == ("b", "data", mount.root)


def test_a_link_of_its_name_is_not_followed(mount, tmp_path_factory):
    """A symbolic link in the place of the nonce proves nothing."""
    written = nonce.write(mount, "a")
    path = mount.local_path(written.name)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    elsewhere.write_text(written.text)
    os.unlink(path)
    os.symlink(elsewhere, path)
    with pytest.raises(NotRegularFileError):
        nonce.read(mount, written, "b", visible_s=0)


@needs("root")
def test_who_may_not_write_is_told():
    """Without the right to write there is a typed error, and no file."""
    # Not in pytest's own directory, which is closed to other users.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        mount = Mount("data", root, "write")
        os.seteuid(65534)
        try:
            assert not nonce.can_write(mount)
            with pytest.raises(PathNotWritableError):
                nonce.write(mount, "a")
        finally:
            os.seteuid(0)
        assert nonce.can_write(mount)
        assert os.listdir(root) == []


def test_a_mount_that_is_gone_is_told(tmp_path):
    """Writing to a directory that is not there is a typed error."""
    with pytest.raises(PathError):
        nonce.write(Mount("data", str(tmp_path / "none"), "write"), "a")


def _name(memory_host, pid, started):
    return f".mmrpc-nonce-{memory_host}-{pid}-{started}-0011aabb"


def test_only_dead_ones_are_swept(mount):
    """What a live process or another host may still use stays; so does every other file."""
    mine = nonce.write(mount, "a")
    dead = _name(host.memory_host_id(), 2**22 - 1, 1)
    old_elsewhere, new_elsewhere = _name("0" * 16, 5, 5), _name("1" * 16, 5, 5)
    for name in (dead, old_elsewhere, new_elsewhere, ".mmrpc-nonce-x", "data.bin"):
        open(mount.local_path(name), "w").close()
    past = time.time() - 10_000
    os.utime(mount.local_path(old_elsewhere), (past, past))
    assert sorted(nonce.sweep(mount, mine, in_use_s=120)) == sorted([dead, old_elsewhere])
    assert sorted(os.listdir(mount.root)) == sorted(
        [mine.name, new_elsewhere, ".mmrpc-nonce-x", "data.bin"]
    )


def test_an_id_file_is_made_once(mount):
    """The id stays what it is, is read-only, and is whole."""
    assert nonce.read_id(mount, "a") is None
    text = nonce.write_id(mount, "a")
    assert nonce.write_id(mount, "b") == text
    found, mark = nonce.read_id(mount, "b")
    path = mount.local_path(nonce.ID_FILE)
    assert found == text
    assert mark.inode == os.stat(path).st_ino
    assert os.stat(path).st_mode & 0o777 == 0o444
    assert os.listdir(mount.root) == [nonce.ID_FILE]
