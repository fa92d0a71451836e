"""The list of what belongs to something published: names, sizes, digests. Pure data.

It is written last. Who finds it finds everything, and can tell whether it is what was written.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrpc.errors import LayoutError
from mmrpc.paths.relative import is_relative

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = ".mmrpc-manifest.json"
MAX_BYTES = 64 << 20
_FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file.

    Attributes:
        size_bytes: Its size.
        digest: ``sha256:…`` of its content.
    """

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of something published.

    Attributes:
        files: Relative paths below the published directory, and what is there.
    """

    files: Mapping[str, Entry]

    def to_json(self) -> str:
        """Gives the text of the manifest's file; equal manifests give equal texts."""
        files = {
            name: {"size_bytes": entry.size_bytes, "digest": entry.digest}
            for name, entry in sorted(self.files.items())
        }
        return json.dumps({"mmrpc_manifest": _FORMAT, "files": files}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Reads the text of a manifest's file.

        Raises:
            LayoutError: If it is none, or has a path that leads elsewhere.
        """
        try:
            tree = json.loads(text)
            if tree["mmrpc_manifest"] != _FORMAT:
                raise LayoutError(f"the manifest has the unknown format {tree['mmrpc_manifest']!r}")
            return cls({name: _entry(name, fields) for name, fields in tree["files"].items()})
        except LayoutError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutError(f"the manifest is malformed ({type(error).__name__})") from None


def _entry(name: str, fields: Any) -> Entry:
    size_bytes, digest = fields["size_bytes"], fields["digest"]
    if not is_relative(name):
        raise LayoutError(f"the manifest names {name!r}, which leads elsewhere")
    if type(size_bytes) is not int or size_bytes < 0:
        raise LayoutError(f"the manifest gives {name!r} the size {size_bytes!r}")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise LayoutError(f"the manifest gives {name!r} no digest")
    return Entry(size_bytes, digest)
