"""Which text may be the path of a file inside a mount. Pure text: nothing is looked at."""

from __future__ import annotations

from mmrpc.errors import OutsideMountsError

_MAX_CHARS = 4096


def split_relative(text: str, *, mount: str | None = None, node: str | None = None) -> list[str]:
    """Splits a relative path into its parts, refusing every text that could mean more than that.

    Args:
        text: What a reference says: names with ``/`` between them.
        mount: Name of the mount, for the error.
        node: Name of this node, for the error.

    Returns:
        The names, at least one.

    Raises:
        OutsideMountsError: For absolute or empty paths, empty parts, ``.``, ``..``, ``::``, a
            NUL, text that is no valid file name, and more characters than any file system takes.
    """
    reason = _objection(text)
    if reason is not None:
        raise OutsideMountsError(reason, path=text[:_MAX_CHARS], mount=mount, node=node)
    return text.split("/")


def is_relative(text: str) -> bool:
    """Whether `split_relative` takes the text."""
    return _objection(text) is None


def _objection(text: str) -> str | None:
    if not text:
        return "an empty path names no file"
    if len(text) > _MAX_CHARS:
        return f"the path is longer than {_MAX_CHARS} characters"
    if "\0" in text:
        return "the path holds a NUL character"
    if text.startswith("/"):
        return "the path is absolute, and a reference names a place inside a mount"
    if "::" in text:
        # fsspec would read it as a chain of file systems.
        return "the path holds '::', which chains file systems"
    for part in text.split("/"):
        if part in ("", ".", ".."):
            return f"the path holds {part!r} as a part"
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "the path holds characters that no file name has"
    return None
