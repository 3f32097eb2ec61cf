"""A Ray cluster of several nodes on this machine. Only one runs at a time."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import becomes_true

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
LOCK = Path("/tmp/rollbus-ray.lock")
NODE = {"num_cpus": 8, "object_store_memory": 100 * 1024**2}
FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with one node. Fail the test if a process of it is left."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = raylets()
        started = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": FAST}
        )
        try:
            yield started
        finally:
            ray.shutdown()
            started.shutdown()
        assert becomes_true(lambda: not raylets() - before), "a process of Ray is left"


def raylets() -> set[int]:
    """Return the processes of Ray nodes, and of workers on them."""
    names = ("raylet", "gcs_server", "ray::Work", "ray::Supe", "ray::Nats")
    own = os.getuid()
    return {
        process.pid
        for process in psutil.process_iter(["name", "uids", "status"])
        if process.info["name"].startswith(names)
        and process.info["uids"].real == own
        and process.info["status"] != psutil.STATUS_ZOMBIE
    }
