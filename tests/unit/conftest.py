"""Processes and places that tests of one machine share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import needs
from tests.peers import NOBODY, Peer

# The machine is shared, so nothing is timed; a fixture's file is replaced by each example.
settings.register_profile(
    "mmrpc",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("mmrpc")

_HERE = Path(__file__).parent
_HAZARDS = [f"tests.unit.{path.stem}" for path in _HERE.glob("test_hazards_*.py")]


@pytest.fixture(scope="session")
def _peer_as_we_are() -> Iterator[Peer]:
    with Peer(modules=_HAZARDS) as peer:
        yield peer


@pytest.fixture(scope="session")
def _peer_as_nobody() -> Iterator[Peer]:
    with Peer(user=NOBODY, modules=_HAZARDS) as peer:
        yield peer


@pytest.fixture
def peer(_peer_as_we_are: Peer) -> Peer:
    """Another process of the same user."""
    return _peer_as_we_are


@pytest.fixture
def other_user(_peer_as_nobody: Peer) -> Peer:
    """A process of another, ordinary user; needs root."""
    return _peer_as_nobody


@pytest.fixture(params=[pytest.param("root", marks=needs("root")), "ordinary user"])
def user(request: pytest.FixtureRequest) -> Peer:
    """A process of root's, and one of an ordinary user's, where the bodies of tests run."""
    is_other = request.param == "ordinary user" and os.geteuid() == 0
    peer: Peer = request.getfixturevalue("other_user" if is_other else "peer")
    return peer


@pytest.fixture
def shared_dir() -> Iterator[str]:
    """A directory that every user may write to, which pytest's own is not."""
    path = tempfile.mkdtemp(prefix="mmrpc-test-")
    os.chmod(path, 0o777)
    yield path
    shutil.rmtree(path)
