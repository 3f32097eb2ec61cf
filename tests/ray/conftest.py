"""A Ray cluster on this machine, to which tests add nodes. Only one runs at a time."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import becomes_true

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
LOCK = Path("/tmp/rollbus-ray.lock")
NODE = {"num_cpus": 2, "object_store_memory": 80 * 1024**2, "include_log_monitor": False}
FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    # By default each node starts a process for each CPU before anything needs one.
    "prestart_worker_first_driver": False,
    # By default actors have a low priority (nice 15): beside other tests, a start of a second takes a minute.
    "worker_niceness": 0,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with one node, for all tests of a file. Fail the last test if a process of it is left."""
    from ray.cluster_utils import Cluster

    with LOCK.open("a") as lock, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
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


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that adds a node until the end of the test."""
    yield lambda **resources: cluster.add_node(**NODE, **resources)
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)


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
