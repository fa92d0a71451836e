"""The errors: their tree, their text, and that all of an error survives pickling."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re

import pytest

from mmrpc import errors
from mmrpc.errors import MmrpcError, PathError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, MmrpcError)
]
BUILTIN_BASES = {
    "MmrpcError": RuntimeError,
    "ConfigError": ValueError,
    "LayoutError": ValueError,
    "UnsupportedTensorError": NotImplementedError,
    "PathNotFoundError": FileNotFoundError,
    "PathExistsError": FileExistsError,
    "PathNotReadableError": PermissionError,
    "PathNotWritableError": PermissionError,
    "NotRegularFileError": OSError,
    "FileTooShortError": EOFError,
    "OutsideMountsError": PermissionError,
    "NoSpaceError": OSError,
    "MountTimeoutError": TimeoutError,
    "RpcTimeoutError": TimeoutError,
    "PeerLostError": ConnectionError,
}


def full(cls: type[MmrpcError]) -> MmrpcError:
    """An error of a class with a value of its own in each attribute."""
    state = {name: f"value of {name}" for name in cls.fields}
    if "problems" in state:
        state["problems"] = ("one", "two")
    return cls(state.pop("reason"), **state)


def drawn_tree() -> dict[str, str | None]:
    """Class to parent, as the docstring of the module draws it."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^( {4}[│├└─ ]*)(\w+Error)\b", line):
            indent, name = len(match[1]), match[2]
            while above and above[-1][0] >= indent:
                above.pop()
            parents[name] = above[-1][1] if above else None
            above.append((indent, name))
    return parents


def test_docstring_draws_the_tree() -> None:
    """The picture at the top of the module is the class tree, no more and no less."""
    real = {
        cls.__name__: next((b.__name__ for b in cls.__bases__ if issubclass(b, MmrpcError)), None)
        for cls in CLASSES
    }
    assert drawn_tree() == real


def test_docstring_tells_the_builtin_bases() -> None:
    """Each line of the picture that says "also X" is right, and none is missing."""
    said = dict(re.findall(r"(\w+Error) +also (\w+)", errors.__doc__))
    assert said == {name: base.__name__ for name, base in BUILTIN_BASES.items()}
    for name, base in BUILTIN_BASES.items():
        assert issubclass(getattr(errors, name), base)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("twin", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_all_of_an_error_survives_pickling(cls, twin) -> None:
    """Class, attributes, text and notes arrive; a second trip changes nothing more."""
    error = full(cls)
    error.add_note("a note")
    other = twin(twin(error))
    assert type(other) is cls
    assert {name: getattr(other, name) for name in cls.fields} == {
        name: getattr(error, name) for name in cls.fields
    }
    assert str(other) == str(error)
    assert other.__notes__ == ["a note"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_attributes_are_documented(cls) -> None:
    """What a class adds to its parent's attributes stands in its docstring."""
    parent = next((b for b in cls.__bases__ if issubclass(b, MmrpcError)), None)
    added = set(cls.fields) - set(parent.fields if parent else ())
    assert cls.__doc__
    for name in added:
        assert re.search(rf"^\s+{name}: ", inspect.getdoc(cls), re.MULTILINE), name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_unknown_attribute_is_refused(cls) -> None:
    """A misspelt attribute is a TypeError that names it."""
    with pytest.raises(TypeError, match=f"{cls.__name__} has no attribute 'hnt'"):
        cls("wrong", hnt="x")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_reason_alone_is_enough(cls) -> None:
    """Whatever else is known, an error has a reason, and its text contains it."""
    assert "it broke" in str(cls("it broke"))


@pytest.mark.parametrize(
    "cls", [c for c in CLASSES if issubclass(c, PathError)], ids=lambda cls: cls.__name__
)
def test_path_error_is_one_sentence(cls) -> None:
    """Node, verb, path, mount, reason and hint make a sentence that says what to do."""
    error = cls("gone", node="w1", path="/data/x", mount="data", hint="Mount it.")
    assert str(error) == f"w1 {cls.verb} '/data/x' (mount 'data'): gone. Mount it."


@pytest.mark.parametrize(
    "cls", [c for c in CLASSES if issubclass(c, OSError)], ids=lambda cls: cls.__name__
)
def test_oserror_attributes(cls) -> None:
    """Code that handles OSError finds an errno, and for a path error the file name."""
    if issubclass(cls, PathError):
        error = cls("gone", path="/data/x")
        assert error.filename == "/data/x"
        assert error.errno in errno.errorcode
        assert pickle.loads(pickle.dumps(error)).errno == error.errno


def test_config_error_points_at_its_place() -> None:
    """File, line, column and key come first, as editors like it."""
    error = errors.ConfigError("unknown key", file="a.yaml", line=3, column=5, key="nodes.a.prot")
    assert str(error) == "a.yaml:3:5: nodes.a.prot: unknown key"


def test_handshake_error_lists_problems() -> None:
    """Without a list the reason is the only problem."""
    assert errors.HandshakeError("rank 2 is absent").problems == ("rank 2 is absent",)


def test_rpc_error_names_call_and_peer() -> None:
    """Function and peer are the subject of the sentence."""
    error = errors.PeerLostError("eof", peer="w1", function="train.step")
    assert str(error) == "train.step() on w1: eof"


def test_text_with_backslash_and_unicode_survives() -> None:
    """What torch's own error text would mangle arrives as it was."""
    error = PathError("caf\N{LATIN SMALL LETTER E WITH ACUTE} \\x41\\N{DASH}", path="/a\\b")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_repr_tells_what_it_is_about(cls) -> None:
    """A repr has the reason and each short attribute that is set, so a list of errors is of use."""
    assert repr(cls("no such file")) == f"{cls.__name__}('no such file')"
    shown = repr(full(cls))
    for name in set(cls.fields) - {"reason", "hint", "problems", "traceback"}:
        assert f", {name}='value of {name}'" in shown
    assert "hint" not in shown


def test_repr_of_a_path_error() -> None:
    """Node and path are in it, as the caller of another node sees it too."""
    error = errors.PathNotFoundError("no such file", node="w1", path="/x", hint="Mount it.")
    told = "PathNotFoundError('no such file', node='w1', path='/x')"
    assert repr(error) == repr(pickle.loads(pickle.dumps(error))) == told
