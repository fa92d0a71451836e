"""Text of a config in YAML, JSON or TOML to a plain tree, and the place of each key in it."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from typing import TYPE_CHECKING, Any

from mmrpc.config.origin import Key, Place
from mmrpc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Tree = dict[str, Any]
Places = dict[Key, Place]

ORIGIN = "$origin"
"""Key under which a resolved config notes where its values came from."""

_MAX_DEPTH = 32
_MAX_VALUES = 200_000  # ten times a cluster of a thousand nodes; aliases can make any number
_TOML_PART = r"""(?:"[^"\n]*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_TOML_KEY = rf"{_TOML_PART}(?:\s*\.\s*{_TOML_PART})*"
_TOML_HEADER = re.compile(rf"^\s*\[\s*({_TOML_KEY})\s*\]")
_TOML_ENTRY = re.compile(rf"^\s*({_TOML_KEY})\s*=")


def parse_text(text: str, file: str, kind: str) -> tuple[Tree, Places]:
    """Parses a config file.

    Args:
        text: What is in it.
        file: Its name, for errors and places.
        kind: ``yaml``, ``json`` or ``toml``.

    Raises:
        ConfigError: With file, line and column, if it is not well formed, gives a key twice, or
            is not a mapping.
    """
    parse = {"yaml": _parse_yaml, "json": _parse_json, "toml": _parse_toml}[kind]
    with _typed_errors(file):
        tree, places = parse(text, file)
        if not isinstance(tree, dict):
            what = "is empty" if tree is None else "is not a mapping"
            raise ConfigError(f"the file {what}", file=file, hint="It must at least have 'nodes'.")
        places[()] = Place(file)
        _fill(tree, (), places)
    return tree, places


def parse_value(text: str) -> Any:
    """Reads one value as YAML, on one line: ``3``, ``true``, ``[a, b]``, ``{a: 1}``, ``text``.

    Raises:
        ConfigError: If it is not well formed.
    """
    with _typed_errors("--set"):
        tree, _ = _parse_yaml(text, "--set")
    return "" if tree is None and not text.strip() else tree


@contextlib.contextmanager
def _typed_errors(file: str) -> Iterator[None]:
    """Makes an error of ours of what the libraries' readers let through."""
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("this is nested too deeply", file=file) from None
    except ValueError as error:  # such as a day that no month has
        raise ConfigError(f"a value cannot be read: {error}", file=file) from None


def _parse_yaml(text: str, file: str) -> tuple[Any, Places]:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    try:
        # Round trip: it keeps the line and column of each key, and refuses a key given twice.
        loaded = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        # Its own text shows the values, which may be secret.
        found = re.search(r'found duplicate key "?([^"\s]+)', str(error.problem))
        reason = f"the key {found[1]!r} is given twice" if found else "a key is given twice"
        raise _at(error.problem_mark, reason, file) from None
    except MarkedYAMLError as error:
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise _at(error.problem_mark or error.context_mark, reason, file) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"the character U+{ord(text[error.position]):04X} is not allowed"
        raise ConfigError(reason, file=file, line=line) from None
    except YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", file=file) from None
    places: Places = {}
    return _plain(loaded, (), places, file), places


def _at(mark: Any, reason: str, file: str) -> ConfigError:
    line = mark.line + 1 if mark is not None else None
    column = mark.column + 1 if mark is not None else None
    return ConfigError(reason, file=file, line=line, column=column)


def _plain(node: Any, key: Key, places: Places, file: str) -> Any:
    """Turns what ruamel gives into plain values, and notes where each key stands."""
    if len(key) > _MAX_DEPTH:
        raise ConfigError("this is nested too deeply", file=file, key=".".join(key[:4]) + "...")
    if len(places) > _MAX_VALUES:
        raise ConfigError(f"this has more than {_MAX_VALUES:,} values", file=file)
    tag = getattr(getattr(node, "tag", None), "value", None)
    if tag is not None:
        raise _unusable(f"the tag {str(tag)!r}", key, places, file, "Leave the tag out.")
    if isinstance(node, dict):
        tree = {}
        for name, value in node.items():
            place = _place(node, name, file)
            if not isinstance(name, str):
                raise ConfigError(
                    f"the key {name!r} is not text",
                    file=file,
                    line=place.line if place else None,
                    column=place.column if place else None,
                    key=".".join(key) or None,
                    hint="Put it in quotes.",
                )
            if place is not None:
                places[*key, name] = place
            tree[str(name)] = _plain(value, (*key, str(name)), places, file)
        return tree
    if isinstance(node, list):
        items = []
        for index, value in enumerate(node):
            place = _place(node, index, file)
            if place is not None:
                places[*key, str(index)] = place
            items.append(_plain(value, (*key, str(index)), places, file))
        return items
    if node is None:
        return None
    # ruamel's scalars are subclasses that remember how they were written.
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if type(node).__name__ == "ScalarBoolean":
        return bool(node)
    what = f"a value of kind {type(node).__name__}"
    raise _unusable(what, key, places, file, "Put it in quotes.")


def _unusable(what: str, key: Key, places: Places, file: str, hint: str) -> ConfigError:
    found = places.get(key, Place(file))
    return ConfigError(
        f"{what} cannot be used",
        file=file,
        line=found.line,
        column=found.column,
        key=".".join(key) or None,
        hint=hint,
    )


def _place(node: Any, name: Any, file: str) -> Place | None:
    try:
        marks = node.lc
        line, column = marks.key(name) if isinstance(node, dict) else marks.item(name)
    except (AttributeError, KeyError, TypeError):
        return None  # merged from another mapping by `<<`
    return Place(file, line + 1, column + 1)


def _parse_json(text: str, file: str) -> tuple[Any, Places]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> Tree:
        tree: Tree = {}
        for name, value in pairs:
            if name in tree:
                raise _DuplicateError(name)
            tree[name] = value
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=refuse_twice)
    except json.JSONDecodeError as error:
        raise ConfigError(
            error.msg[:1].lower() + error.msg[1:], file=file, line=error.lineno, column=error.colno
        ) from None
    except _DuplicateError as error:
        # JSON is YAML, whose reader knows the line; it may not read all of it.
        _parse_yaml(text.replace("\t", " "), file)
        raise ConfigError(f"the key {error.name!r} is given twice", file=file) from None
    if isinstance(tree, dict) and ORIGIN in tree:
        return tree, {}  # it brings the places of the file that a person wrote
    try:
        _, places = _parse_yaml(text.replace("\t", " "), file)
    except ConfigError:
        places = {}
    return tree, places


class _DuplicateError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _parse_toml(text: str, file: str) -> tuple[Any, Places]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.match(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        reason = found[1] if found else str(error)
        line, column = (found[2], found[3]) if found else (None, None)
        raise ConfigError(
            reason[:1].lower() + reason[1:],
            file=file,
            line=int(line) if line else None,
            column=int(column) if column else None,
        ) from None
    return tree, _toml_places(text, file)


def _toml_places(text: str, file: str) -> Places:
    """Finds keys in the text, since tomllib forgets where they were."""
    places: Places = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, entry = _TOML_HEADER.match(line), _TOML_ENTRY.match(line)
        match = header or entry
        if match is None:
            continue
        key = tuple(part.strip("\"'") for part in re.findall(_TOML_PART, match[1]))
        if header:
            table = key
        else:
            key = (*table, *key)
        for length in range(len(key), 0, -1):
            # `a.b = 1` is also where `a` begins, unless it has begun before.
            places.setdefault(key[:length], Place(file, number, match.start(1) + 1))
    return places


def _fill(node: Any, key: Key, places: Places) -> None:
    """Gives keys without a place of their own the place of what they stand in."""
    items = (
        node.items()
        if isinstance(node, dict)
        else ((str(index), item) for index, item in enumerate(node))
        if isinstance(node, list)
        else ()
    )
    for name, value in items:
        places.setdefault((*key, name), places[key])
        _fill(value, (*key, name), places)
