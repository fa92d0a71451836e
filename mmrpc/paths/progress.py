"""How far a long transfer is, for whoever wants to know."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec.callbacks import Callback

_log = logging.getLogger(__name__)
_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """A moment of a transfer.

    Attributes:
        mount: Name of the mount.
        path: Path in the mount.
        done_bytes: Bytes that are here.
        total_bytes: Bytes of the whole.
        elapsed_s: Seconds since it began.
    """

    mount: str
    path: str
    done_bytes: int
    total_bytes: int
    elapsed_s: float


def log(report: Report) -> None:
    """Writes a report to the log of this module."""
    _log.info(
        "%s/%s: %.2f of %.2f GiB after %.0f s",
        report.mount,
        report.path,
        report.done_bytes / 2**30,
        report.total_bytes / 2**30,
        report.elapsed_s,
    )


def callback(
    mount: str,
    path: str,
    total_bytes: int,
    report: Callable[[Report], object] | None,
) -> Callback:
    """Makes what fsspec calls during a transfer; short ones are not reported at all."""
    from fsspec.callbacks import Callback

    tell = report or log
    started = time.monotonic()
    told = started

    def on_update(size: int | None, value: int, **_: object) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _EVERY_S:
            told = now
            tell(Report(mount, path, value, total_bytes, now - started))

    return Callback(hooks={"report": on_update})
