"""Objects behind a URL, by fsspec: what is there, which version, and how to get or put it.

File systems are made in the process that uses them and never pickled; credentials are the
node's own (fsspec's config, the environment), so nothing here knows any.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrpc.core import files
from mmrpc.errors import (
    NotRegularFileError,
    PathError,
    PathExistsError,
    PathNotFoundError,
    PathNotReadableError,
    PathNotWritableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsspec.callbacks import Callback

    from mmrpc.paths.mounts import Mount

# Object stores, which show an object when its last byte is there, and not before.
_ATOMIC_PUT = ("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a")
# What pip calls the packages for a scheme.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("sftp", "ssh"), "sftp"),
    **dict.fromkeys(("http", "https"), "http"),
}
_ETAGS = ("ETag", "etag", "e_tag")
_CHECKSUMS = ("md5Hash", "Content-MD5", "Digest")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of a remote object.

    Attributes:
        size_bytes: Its size.
        tag: What tells it from other versions: ``version:…``, ``etag:…``, ``checksum:…`` or
            ``time:…``; empty if the server says nothing.
    """

    size_bytes: int
    tag: str


class Remote:
    """A remote mount, through the implementation that this node has for its scheme.

    Args:
        mount: The mount; its root is a URL.
        node: Name of this node, for errors.
    """

    def __init__(self, mount: Mount, *, node: str | None = None) -> None:
        self.mount = mount
        self.node = node
        with self._typed(mount.root):
            # Imported late: most jobs have no remote mount.
            from fsspec.core import url_to_fs

            self._fs, base = url_to_fs(mount.root)
            self._base = str(base).rstrip("/")

    @property
    def implementation(self) -> str:
        """Class and version of what serves the scheme here, as another package may replace it."""
        kind = type(self._fs)
        return f"{kind.__module__}.{kind.__qualname__} {_version(kind.__module__)}".strip()

    @property
    def endpoint(self) -> str:
        """Which service it is, where the URL does not say: two may have one bucket and key."""
        chosen = getattr(self._fs, "endpoint_url", None)
        if chosen or not self.mount.root.startswith(("s3:", "s3a:")):
            return str(chosen or "")
        return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")

    def url(self, relative: str) -> str:
        """Names an object for people."""
        return f"{self.mount.root.rstrip('/')}/{relative}"

    def _path(self, relative: str) -> str:
        if self._base.startswith(("http://", "https://")):
            # Otherwise `%2e%2e` would be read as `..`, and `?` as the start of a query.
            relative = urllib.parse.quote(relative)
        return f"{self._base}/{relative}"

    def info(self, relative: str) -> ObjectInfo:
        """Asks the server, and no cache, which version is there.

        Raises:
            PathNotFoundError: If there is none.
            NotRegularFileError: If it is a directory.
            PathError: If the server does not say how large it is, or fails otherwise.
        """
        path = self._path(relative)
        with self._typed(self.url(relative)):
            self._fs.invalidate_cache(path)
            found = self._fs.info(path)
            if found.get("type") != "file":
                raise NotRegularFileError(
                    f"it is a {found.get('type')}", path=self.url(relative), **self._about
                )
            if found.get("size") is None:
                raise PathError(
                    "the server does not say how large it is",
                    path=self.url(relative),
                    **self._about,
                )
            return ObjectInfo(int(found["size"]), _tag(found))

    def get(self, relative: str, target: str, callback: Callback | None = None) -> None:
        """Copies an object into a local file, which may be left incomplete by an error."""
        with self._typed(self.url(relative)):
            options = {} if callback is None else {"callback": callback}
            self._fs.get_file(self._path(relative), target, **options)

    def put(self, source: str, relative: str) -> None:
        """Copies a local file to an object, which is there only when it is whole."""
        path = self._path(relative)
        with self._typed(self.url(relative), writing=True):
            if self._is_put_atomic:
                self._fs.put_file(source, path)
            else:
                part = self._make_room(path)
                self._fs.put_file(source, part)
                self._fs.mv(part, path)
            self._fs.invalidate_cache(path)

    def create(self, relative: str, content: bytes) -> None:
        """Makes a small object, at once.

        Raises:
            PathExistsError: If there is one already, where the server can tell.
        """
        path = self._path(relative)
        with self._typed(self.url(relative), writing=True):
            if self._is_put_atomic:
                with contextlib.suppress(NotImplementedError):
                    self._fs.pipe_file(path, content, mode="create")
                    return
                self._fs.pipe_file(path, content)
            else:
                part = self._make_room(path)
                self._fs.pipe_file(part, content)
                self._fs.mv(part, path)

    @property
    def _is_put_atomic(self) -> bool:
        return self.mount.root.partition(":")[0] in _ATOMIC_PUT

    def _make_room(self, path: str) -> str:
        """Makes the directory of a file, and gives a temporary name there."""
        # Not for object stores: they have none, and s3fs would make a missing bucket.
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return f"{path}.{secrets.token_hex(8)}.part"

    def read(self, relative: str, max_bytes: int) -> bytes:
        """Reads a small object whole.

        Raises:
            PathError: If it is larger than `max_bytes`, or as `info`.
        """
        size_bytes = self.info(relative).size_bytes
        if size_bytes > max_bytes:
            raise PathError(
                f"it has {size_bytes:,} bytes, and at most {max_bytes:,} are read at once",
                path=self.url(relative),
                **self._about,
            )
        with self._typed(self.url(relative)):
            return bytes(self._fs.cat_file(self._path(relative)))

    def remove(self, relative: str) -> None:
        """Removes an object; it need not be there."""
        with self._typed(self.url(relative), writing=True), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(relative))

    def list(self) -> int:
        """Counts the entries of the mount's root, to see that it answers."""
        with self._typed(self.mount.root):
            self._fs.invalidate_cache(self._base)
            try:
                return len(self._fs.ls(self._base, detail=False))
            except FileNotFoundError:
                bucket, slash, _ = self._base.partition("/")
                if not (slash and bucket and self._is_put_atomic):
                    raise
            # A prefix is there when the first object is; what must be there is the bucket.
            self._fs.ls(bucket, detail=False)
            return 0

    @property
    def _about(self) -> dict[str, str | None]:
        return {"mount": self.mount.name, "node": self.node}

    @contextlib.contextmanager
    def _typed(self, url: str, *, writing: bool = False) -> Iterator[None]:
        """Turns what fsspec's many implementations raise into errors of ours."""
        try:
            yield
        except PathError:
            raise
        except FileNotFoundError as error:
            # Over HTTP every failure of `info` is a FileNotFoundError, also that of a dead server.
            cause = error.__cause__
            if url.startswith("http") and isinstance(cause, Exception) and _is_other(cause):
                raise self._other(cause, url) from error
            raise PathNotFoundError("no such object", path=url, **self._about) from error
        except FileExistsError as error:
            raise PathExistsError("there is an object of that name", path=url, **self._about) from (
                error
            )
        except PermissionError as error:
            kind = PathNotWritableError if writing else PathNotReadableError
            raise kind(
                "the server denied access",
                path=url,
                hint="Check the credentials in this node's fsspec config or environment.",
                **self._about,
            ) from error
        except ImportError as error:
            scheme = self.mount.root.partition(":")[0]
            extra = _EXTRAS.get(scheme)
            raise PathError(
                f"no package for {scheme}:// is installed",
                path=url,
                hint=f"On this node: pip install 'mmrpc[{extra}]'." if extra else str(error),
                **self._about,
            ) from error
        except Exception as error:
            raise self._other(error, url) from error

    def _other(self, error: Exception, url: str) -> PathError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            typed = files.path_error(error, str(error.filename or url), node=self.node)
            typed.mount = self.mount.name
            return typed
        if getattr(error, "status", None) in (401, 403):
            return PathNotReadableError("the server denied access", path=url, **self._about)
        # The text of a foreign error may hold a signed URL or a key: its class has to do.
        return PathError(
            f"the server or its client failed ({type(error).__name__})",
            path=url,
            hint="Check that the server answers, and the endpoint and credentials in this node's "
            "fsspec config or environment. The error's __cause__ says more.",
            **self._about,
        )


def _is_other(cause: Exception) -> bool:
    return not isinstance(cause, FileNotFoundError) and getattr(cause, "status", None) != 404


def _tag(info: dict[str, Any]) -> str:
    version = info.get("VersionId") or info.get("generation")
    if version not in (None, "", "null"):
        return f"version:{version}"
    for key in _ETAGS:
        if info.get(key):
            return "etag:" + str(info[key]).strip('"')
    for key in _CHECKSUMS:
        if info.get(key):
            return f"checksum:{info[key]}"
    for key in _TIMES:
        if info.get(key):
            # Times of many servers have whole seconds: the size tells some changes apart.
            return f"time:{_time(info[key])}:{info.get('size')}"
    return ""


def _time(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat()
    return str(value)


def _version(module: str) -> str:
    from importlib import metadata

    package = module.partition(".")[0]
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
