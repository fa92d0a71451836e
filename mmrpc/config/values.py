"""Kinds of values in a config: names, hosts, paths, tables. Each refuses what could mislead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

T = TypeVar("T")

# Schemes of fsspec that name something of one process or one host, or wrap another file system:
# two nodes can never mean the same by them.
_UNSHAREABLE = frozenset(
    (
        *("file", "local", "memory", "dir", "root", "data", "dask", "jlab", "jupyter"),
        *("simplecache", "filecache", "blockcache", "cached", "asyncwrapper", "generic"),
        *("reference", "tar", "zip", "libarchive"),
    )
)
_URL = re.compile(r"^(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>/.*)?$")


class FrozenDict(dict[str, T]):
    """A dict that nobody can change: a config means the same from start to end."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a config cannot be changed; make a new one with model_copy(update=...)")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse
    __ior__ = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[T]], tuple[dict[str, T]]]:
        # The default would rebuild by __setitem__.
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict[T]:
        return self


def _number_to_text(value: Any) -> Any:
    # YAML reads `--lr 0.1` in a list as a number. A boolean has no one spelling: refuse it below.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _check_text(text: str) -> str:
    """Refuses what the operating system takes in no argument, variable or path."""
    if "\0" in text:
        raise ValueError("this cannot hold a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("this cannot hold half of a surrogate pair")
    return text


Text = Annotated[str, BeforeValidator(_number_to_text), AfterValidator(_check_text)]
"""A string; numbers are taken as they are written."""

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$"


def _check_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            "a name holds letters, digits, '_' and '-' only, starts with no '-', and has at most "
            "64 characters"
        )
    return name


Name = Annotated[str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": _NAME})]
"""A node, mount or role: letters, digits, ``_`` and ``-``; no dot, so that ``--set`` can say it."""


def _check_variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("this is not the name of a variable")
    return _check_text(name)


Table = Annotated[Mapping[Name, T], AfterValidator(FrozenDict)]
"""Names to values, in the order of the file; immutable."""

Env = Annotated[
    Mapping[Annotated[str, AfterValidator(_check_variable)], Text], AfterValidator(FrozenDict)
]
"""Environment variables, in the order of the file; immutable."""


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # which is 0 or 1 to Python, and a slip in a config
        raise ValueError("this should be a number")
    return value


Integer = Annotated[int, BeforeValidator(_refuse_boolean)]
"""A whole number."""

Seconds = Annotated[float, BeforeValidator(_refuse_boolean), Field(ge=0, le=1e6)]
"""A time; 11 days at most, which is about what the kernel's timers take."""

Bytes = Annotated[ByteSize, BeforeValidator(_refuse_boolean)]
"""A size, such as ``200GiB``."""


def _check_host(host: str) -> str:
    if not host or re.search(r"[\s/@%,;]", host):
        raise ValueError(f"{host!r} is not a host name or an address")
    if host.startswith("-"):
        raise ValueError("a host cannot start with '-': programs would take it for an option")
    if host.count(":") == 1:
        raise ValueError(f"{host!r} has a port; give the host alone")
    return host


Host = Annotated[str, AfterValidator(_check_host)]
"""A host name or an address, without user and port."""


def _check_no_tricks(path: str) -> None:
    _check_text(path)
    if "::" in path:
        raise ValueError("'::' chains file systems and is not allowed in a path")
    if ".." in path.split("/"):
        raise ValueError("'..' is not allowed in a path")


def check_absolute(path: str) -> str:
    """Gives an absolute local path without ``//`` and a trailing slash.

    Raises:
        ValueError: If it is relative, or holds ``..``, ``::`` or NUL.
    """
    _check_no_tricks(path)
    if path.startswith("~"):
        raise ValueError("'~' means another thing to another user; write the absolute path")
    if not path.startswith("/"):
        raise ValueError(
            f"{path!r} is relative, which means another place in each process; "
            "write the absolute path"
        )
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def check_mount_root(root: str) -> str:
    """Gives where a mount is on a node: an absolute path, or a URL that fsspec can serve.

    Raises:
        ValueError: If it is neither, or carries a credential.
    """
    if "://" not in root:
        if re.match(r"^[a-z][a-z0-9+-]+:", root):
            raise ValueError(f"{root!r} is neither an absolute path nor scheme://...")
        return check_absolute(root)
    _check_no_tricks(root)
    match = _URL.match(root)
    if match is None:
        raise ValueError("this is not a URL of the form scheme://host/path")
    scheme, authority = match["scheme"], match["authority"]
    if scheme in ("file", "local"):
        raise ValueError("write a local path without a scheme")
    if scheme in _UNSHAREABLE or scheme not in _schemes():
        raise ValueError(f"no remote file system is known by {scheme}://")
    if not authority:
        raise ValueError("the URL names no host or bucket")
    user, at, _ = authority.rpartition("@")
    if (at and ":" in user) or re.search(r"[?#]", root):
        raise ValueError(
            "a URL in a config must carry no password, query or token: credentials belong in the "
            "node's own fsspec config or environment"
        )
    path = "/".join(part for part in (match["path"] or "").split("/") if part not in ("", "."))
    return f"{scheme}://{authority}" + (f"/{path}" if path else "")


def _schemes() -> set[str]:
    from fsspec.registry import available_protocols

    return set(available_protocols())


AbsolutePath = Annotated[str, AfterValidator(check_absolute)]
"""An absolute local path."""

MountRoot = Annotated[str, AfterValidator(check_mount_root)]
"""An absolute local path, or a URL of a remote file system without credentials."""


def _check_program(program: str) -> str:
    if not program or program.startswith("-"):
        raise ValueError("this is not a program")
    return check_absolute(program) if "/" in program or program.startswith("~") else program


Program = Annotated[str, AfterValidator(_check_program)]
"""An absolute path, or a bare command to be found on the node's ``PATH``."""
