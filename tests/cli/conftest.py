"""A fleet that the tests of several files share."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.cli.support import running_up, serves
from tests.support.waits import Shared


@pytest.fixture(scope="session")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[tuple[Any, dict[str, Any]]]]:
    """Start a fleet of two synthetic workers and the HTTP service when a test first needs it."""
    log = tmp_path_factory.mktemp("up") / "log"

    def make() -> AbstractContextManager[tuple[Any, dict[str, Any]]]:
        return running_up("--engine", "synthetic", "--workers", "2", "--http", "127.0.0.1:0", log=log)

    with Shared(make, is_sound=lambda up: serves(up[1]["nats"], 2)) as shared:
        yield shared


@pytest.fixture
def nats(ups: Shared[tuple[Any, dict[str, Any]]]) -> str:
    """Return the NATS address of the shared fleet."""
    return str(ups.get()[1]["nats"])
