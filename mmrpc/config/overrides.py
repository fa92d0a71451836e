"""``--set a.b=c``: values put into the raw tree before it is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmrpc.config.origin import Place
from mmrpc.config.sources import parse_value
from mmrpc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mmrpc.config.origin import Key
    from mmrpc.config.sources import Places, Tree

SOURCE = "--set"


def apply_sets(tree: Tree, places: Places, settings: Iterable[str]) -> None:
    """Puts values into a tree, in order; the last one wins.

    Args:
        tree: Changed in place.
        places: Changed in place: what is set comes from ``--set``.
        settings: Each ``dotted.key=value`` with the value in YAML, such as ``{a: 1, b: 2}``.

    Raises:
        ConfigError: If one is not of that form, or leads through a value that has no keys.
    """
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        key = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(key):
            raise ConfigError(
                f"{dotted!r} is not of the form key=value",
                file=SOURCE,
                hint="Write for example rpc.timeout_s=30.",
            )
        try:
            value = parse_value(text)
        except ConfigError as error:
            raise ConfigError(error.reason, file=SOURCE, key=dotted) from None
        _put(tree, key, value)
        for old in [place for place in places if place[: len(key)] == key]:
            del places[old]
        for length in range(1, len(key) + 1):
            places.setdefault(key[:length], Place(SOURCE))
        _note(value, key, places)


def _put(tree: Any, key: Key, value: Any) -> None:
    node = tree
    for depth, name in enumerate(key):
        last = depth == len(key) - 1
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise _cannot(key, f"it has {len(node)} items, and {name!r} is none of them", depth)
            if last:
                node[int(name)] = value
            else:
                node = node[int(name)]
        elif isinstance(node, dict):
            if last:
                node[name] = value
            else:
                if node.get(name) is None:
                    node[name] = {}
                node = node[name]
        else:
            raise _cannot(key, "it is a single value, without keys", depth)


def _cannot(key: Key, why: str, depth: int) -> ConfigError:
    return ConfigError(
        f"cannot be set: {why}", file=SOURCE, key=".".join(key[:depth]) or ".".join(key)
    )


def _note(value: Any, key: Key, places: Places) -> None:
    places[key] = Place(SOURCE)
    if isinstance(value, dict):
        for name, item in value.items():
            _note(item, (*key, str(name)), places)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _note(item, (*key, str(index)), places)
