"""What a remote mount says of a server or a package that is not there."""

from __future__ import annotations

import pytest

from mmrpc.errors import PathError
from mmrpc.paths.mounts import Mount
from mmrpc.paths.remote import Remote
from mmrpc.testing import free_port


def test_a_package_that_is_missing_is_named_as_pip_has_it(monkeypatch):
    """Not the one that fsspec would take, of which mmrpc knows nothing."""

    def refuse(url):
        raise ImportError('SFTPFileSystem requires "paramiko" to be installed')

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(PathError, match="no package for sftp:// is installed") as caught:
        Remote(Mount("data", "sftp://host/data", "read"))
    assert caught.value.hint == "On this node: pip install 'mmrpc[sftp]'."


def test_a_server_that_does_not_answer_is_told_with_what_to_look_at():
    """The text of its client may hold a key, and is in the cause alone."""
    mount = Mount("data", f"http://127.0.0.1:{free_port()}/data?key=secret", "read")
    with pytest.raises(PathError, match="the server or its client failed") as caught:
        Remote(mount).info("x")
    assert "endpoint and credentials" in str(caught.value.hint)
    assert caught.value.__cause__ is not None
