"""What holds for every test of the core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmrpc.core import lease


@pytest.fixture(autouse=True)
def _no_leases() -> Iterator[None]:
    """Each test begins and ends without memory that waits for its receivers."""
    lease.end_all()
    yield
    lease.end_all()
