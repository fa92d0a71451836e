"""Where a named mount is on this node, and whether it can be read.

The functions here work on the mounts of the cluster that `mmrpc.rpc.init_rpc` joined, and belong
to `shared`. Of the rest, `mounts` and `resolver` find files, `access` and `beneath` open them,
`probing` and `checks` look whether a mount answers, `stage` and `remote` copy what is remote,
and `publishing` and `manifest` show a set of files to all nodes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextlib

    from mmrpc.paths.shared import SharedFiles

__all__ = ["load_tree", "local_copy", "publish", "published"]


def local_copy(url: str) -> str:
    """Gives the local path of ``mount://NAME/PATH``; see `SharedFiles.local_copy`."""
    return _files().local_copy(url)


def publish(mount: str, path: str) -> contextlib.AbstractContextManager[str]:
    """Publishes files together; see `SharedFiles.publish`.

    with mmrpc.paths.publish("params", "v7") as directory:
        mmrpc.save_tree(directory, tree)
    """
    return _files().publish(mount, path)


def published(mount: str, path: str) -> dict[str, str]:
    """Gives names and local paths of what was published; see `SharedFiles.published`."""
    return _files().published(mount, path)


def load_tree(mount: str, path: str) -> Any:
    """Maps a tree of tensors that was published; see `SharedFiles.load_tree`."""
    return _files().load_tree(mount, path)


def _files() -> SharedFiles:
    from mmrpc.core.resolver import get_resolver
    from mmrpc.errors import ConfigError
    from mmrpc.paths.resolver import ClusterResolver

    resolver = get_resolver()
    resolver = getattr(resolver, "resolver", resolver)  # RPC puts it into one that keeps mappings
    if not isinstance(resolver, ClusterResolver):
        raise ConfigError(
            "this process knows no mounts",
            node=resolver.node,
            hint="Pass cluster= to init_rpc first.",
        )
    return resolver.files
