"""A directory as a mount."""

from __future__ import annotations

import os
from pathlib import Path

from mmrpc.paths.mounts import Mount
from mmrpc.testing import MountConformance


class TestDirectory(MountConformance):
    """Files in a directory of a local disk."""

    def make_mount(self, tmp_path: Path) -> Mount:
        self.root = tmp_path / "mount"
        self.root.mkdir()
        return Mount("data", str(self.root), "write")

    def put(self, relative: str, content: bytes) -> None:
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(content)
        os.rename(new, path)

    def delete(self, relative: str) -> None:
        (self.root / relative).unlink()
