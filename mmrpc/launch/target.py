"""What a role runs: a function, a script or any command. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrpc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Target:
    """A role's target, told apart.

    Attributes:
        kind: ``function``, ``script`` or ``command``.
        words: ``(module, name)``, ``(path,)`` or the words of the command.
    """

    kind: str
    words: tuple[str, ...]

    def argv(self, python: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs it, as a user could type it."""
        if self.kind == "function":
            shim = [python, "-m", "mmrpc.launch.worker"]
            return [*shim, ":".join(self.words), *arguments]
        if self.kind == "script":
            return [python, *self.words, *arguments]
        return [*self.words, *arguments]


def parse(target: str | Sequence[str]) -> Target:
    """Tells a target apart: ``module:function``, a path that ends in ``.py``, or a command.

    Args:
        target: A string, which a command splits as a shell would, or the command's words.

    Raises:
        ConfigError: If it is empty, or its quotes do not match.
    """
    if not isinstance(target, str):
        words = tuple(target)
    elif _FUNCTION.fullmatch(target):
        module, _, name = target.partition(":")
        return Target("function", (module, name))
    else:
        try:
            words = tuple(shlex.split(target))
        except ValueError as error:
            raise ConfigError(f"cannot split the command {target!r}: {error}") from None
    if not words:
        raise ConfigError(
            "a target is empty", hint="Give module:function, a script's path or a command."
        )
    if len(words) == 1 and words[0].endswith(".py"):
        return Target("script", words)
    return Target("command", words)
