"""What tests of launches share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.slurmd import Slurm, serving


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One Slurm for all tests; what needs it is marked so."""
    with serving(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm
