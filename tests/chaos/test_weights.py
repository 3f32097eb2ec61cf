"""A short chaos run while versions are published. `python -m tests.chaos.weights` runs longer."""

from pathlib import Path

import pytest

from tests.chaos.weights import Settings, walk
from tests.chaos.weights_faults import KINDS
from tests.support.nats_server import require_binary

pytestmark = pytest.mark.slow


@pytest.mark.proves("P9")
async def test_every_version_that_is_published_during_faults_is_exact(tmp_path: Path) -> None:
    """After each version that is published during a fault, folders, tokens and the store are exact."""
    require_binary()
    said: list[str] = []
    with (tmp_path / "workers.log").open("wb") as log:
        summary = await walk(Settings(), tmp_path / "walk", stderr=log.fileno(), say=said.append)

    assert len(said) == Settings().num_versions
    assert summary.faults.keys() == set(KINDS)
    assert summary.num_tokens > 0
