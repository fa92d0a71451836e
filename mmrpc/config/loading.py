"""A config file, with ``--set``, to a checked `ClusterConfig`, or one `ConfigError`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mmrpc.config.cluster import ClusterConfig
from mmrpc.config.origin import Origin, Place
from mmrpc.config.overrides import apply_sets
from mmrpc.config.sources import ORIGIN, parse_text
from mmrpc.config.wording import nearest
from mmrpc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mmrpc.config.origin import Key
    from mmrpc.config.sources import Places, Tree

_KINDS = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
_MAX_CHARACTERS = 4 << 20  # of a cluster of ten thousand nodes; a data file's name is a slip


def load_config(
    path: str | os.PathLike[str],
    set: Iterable[str] = (),
) -> ClusterConfig:
    """Loads and checks a config: defaults, then the file, then ``set``.

    Args:
        path: A ``.yaml``, ``.json`` or ``.toml`` file.
        set: ``dotted.key=value`` texts, as of ``--set``; the values are YAML.

    Raises:
        ConfigError: With file, line, column and key of the first problem, and all of them in its
            text.
    """
    file = os.fspath(path)
    kind = _KINDS.get(os.path.splitext(file)[1].lower())
    if kind is None:
        raise ConfigError(
            "the kind of this file is not known", file=file, hint="Name it .yaml, .json or .toml."
        )
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(_MAX_CHARACTERS + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"it cannot be read: {reason}", file=file) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 at byte {error.start}", file=file) from None
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"it has more than {_MAX_CHARACTERS:,} characters", file=file)
    tree, places = parse_text(text, file, kind)
    if kind == "json":
        places = _take_origin(tree, file) or places
    return _build(tree, places, set, file)


def parse_config(
    tree: Mapping[str, Any],
    set: Iterable[str] = (),
) -> ClusterConfig:
    """Checks a config given as nested dicts; like `load_config`, without a file.

    Raises:
        ConfigError: With the key of the first problem, and all of them in its text.
    """
    copy = _copy(tree)
    places = _take_origin(copy, None) or {}
    return _build(copy, places, set, None)


def dump_config(cluster: ClusterConfig) -> dict[str, Any]:
    """Gives the resolved config as JSON values, for another process of the same job.

    It remembers where each value came from, so that errors on other nodes name the lines of the
    file that a person wrote. `parse_config` and `load_config` read it. Secrets are in it.
    """
    origin = cluster.origin
    places = [
        [".".join(key), place.file, place.line, place.column]
        for key, place in origin.places.items()
    ]
    tree: dict[str, Any] = cluster.model_dump(mode="json")
    return {**tree, ORIGIN: {"file": origin.file, "places": places}} if places else tree


def _take_origin(tree: Any, file: str | None) -> Places | None:
    """Removes what `dump_config` noted, and gives it."""
    noted = tree.pop(ORIGIN, None) if isinstance(tree, dict) else None
    if noted is None:
        return None
    try:
        return {
            tuple(dotted.split(".")) if dotted else (): Place(file, line, column)
            for dotted, file, line, column in noted["places"]
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError("this was not written by mmrpc", file=file, key=ORIGIN) from None


def _copy(node: Any) -> Any:
    """Copies the containers only, as ``--set`` changes them."""
    if hasattr(node, "items"):
        return {key: _copy(value) for key, value in node.items()}
    return [_copy(item) for item in node] if isinstance(node, list | tuple) else node


def _build(tree: Tree, places: Places, settings: Iterable[str], file: str | None) -> ClusterConfig:
    apply_sets(tree, places, settings)
    root = places.get(())
    origin = Origin(root.file if root else file, places)
    try:
        cluster = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise _convert(error, origin) from None
    cluster._origin = origin
    return cluster


def _convert(error: ValidationError, origin: Origin) -> ConfigError:
    """Makes one error of all that pydantic found, in the order of the file."""
    problems: list[tuple[Key, str]] = []
    for detail in error.errors(include_url=False, include_input=False):
        key = tuple(str(part) for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing" and key[0] == "master":
            continue  # it follows from the nodes, so there is an error about them
        nested = detail.get("ctx", {}).get("problems")
        if nested:
            problems += [(tuple(inner), text) for inner, text in nested]
        else:
            problems.append((key, _describe(detail["type"], detail["msg"], key)))
    located = [(origin.find(key), key, text) for key, text in problems]
    located.sort(key=lambda item: _order(item[0]))
    place, key, reason = located[0]
    others = "".join(
        f"\n  and {where}: {'.'.join(other)}: {text}"
        if where
        else f"\n  and {'.'.join(other)}: {text}"
        for where, other, text in located[1:]
    )
    return ConfigError(
        reason + others,
        file=place.file if place else None,
        line=place.line if place else None,
        column=place.column if place else None,
        key=".".join(key) or None,
    )


def _order(place: Place | None) -> tuple[int, int]:
    return (place.line or 0, place.column or 0) if place else (0, 0)


def _describe(kind: str, message: str, key: Key) -> str:
    if kind == "extra_forbidden":
        valid = _valid_keys(key[:-1])
        return f"unknown key {key[-1]!r} (valid: {', '.join(valid)}){nearest(key[-1], valid)}"
    if kind == "missing":
        return "this is required"
    if kind in ("model_type", "model_attributes_type", "mapping_type", "dict_type"):
        return "this should be a mapping"
    if kind == "int_parsing":
        return "this should be a whole number"
    if kind == "float_parsing":
        return "this should be a number, without a unit"
    if kind == "too_short":
        return "this is empty"
    text = message.removeprefix("Value error, ").replace("Input should be", "this should be")
    return text[:1].lower() + text[1:] if text[:2].istitle() else text


def _valid_keys(key: Key) -> list[str]:
    """Gives the keys of the model at a place in the tree."""
    kind: Any = ClusterConfig
    for name in key:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[name].annotation
        else:
            kind = get_args(kind)[-1] if get_origin(kind) else None
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
