"""A web server as a mount, by the standard library's."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrpc.conformance import MountConformance
from mmrpc.paths.mounts import Mount


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the URL at which it is served."""
    pytest.importorskip("aiohttp")
    directory = tmp_path / "served"
    (directory / "data").mkdir(parents=True)
    server = _Server(("127.0.0.1", 0), functools.partial(_Handler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield directory, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TestHttp(MountConformance):
    """Files below a path of a web server, which tells whole seconds and takes no files."""

    writable = False
    tells_versions = False

    @pytest.fixture(autouse=True)
    def _server(self, web: tuple[Path, str]) -> None:
        self.directory, self.url = web

    def make_mount(self, tmp_path: Path) -> Mount:
        return Mount("data", f"{self.url}/data")

    def put(self, relative: str, content: bytes) -> None:
        path = self.directory / "data" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(content)
        os.rename(new, path)

    def delete(self, relative: str) -> None:
        (self.directory / "data" / relative).unlink()
