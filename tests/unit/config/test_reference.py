"""docs/config.md lists what the models have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mmrpc.config import json_schema
from tests.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


def _rows(part: dict[str, Any], required: list[str]) -> Iterator[str]:
    for key, value in part["properties"].items():
        if key in required:
            default = "required"
        elif (given := value.get("default")) in (None, {}, []) or isinstance(given, dict):
            default = ""
        else:
            default = f"`{given if isinstance(given, str) else json.dumps(given)}`"
        text = value["description"].replace("``", "`")
        yield f"| `{key}` | {default} | {text} |"


def test_every_key_is_in_the_document():
    """With its default and the words of its model; on failure, the rows to paste are shown."""
    schema = json_schema()
    parts = {"ClusterConfig": schema, **schema["$defs"]}
    wanted = [row for part in parts.values() for row in _rows(part, part.get("required", []))]
    text = (ROOT / "docs/config.md").read_text()
    missing = [row for row in wanted if row not in text]
    assert not missing, "\n".join(missing)
    listed = [line for line in text.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(wanted)
