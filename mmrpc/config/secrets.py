"""What must not be printed: values whose names say that they are secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "********"

_SECRET = re.compile(
    r"secret|token|passw|passphrase|credential|(^|_)(api_?)?key($|_)|apikey|(^|_)auth($|_)|cookie"
    r"|private|(^|_)pat$|signature|connection_string",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")


def is_secret(name: str) -> bool:
    """Whether the value of an environment variable of that name must not be shown."""
    return _SECRET.search(name) is not None


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """Gives the variables with the values of secret ones, and passwords in URLs, hidden."""
    return {k: MASK if is_secret(k) else _USERINFO.sub(MASK, v) for k, v in env.items()}


def mask(tree: Any) -> Any:
    """Gives a copy of a dumped config in which every ``env`` is safe to print."""
    if isinstance(tree, Mapping):
        return {
            key: mask_env(value) if key == "env" and isinstance(value, Mapping) else mask(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [mask(item) for item in tree]
    return tree
