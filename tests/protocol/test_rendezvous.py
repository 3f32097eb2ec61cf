"""Clients choose the same worker for a key without communication."""

from collections import Counter

import pytest

from rollbus.bus.protocol.queue.placement import rendezvous

WORKERS = [f"worker-{i}" for i in range(16)]
KEYS = [f"session-{i}" for i in range(16_000)]


def test_the_choice_depends_only_on_the_names() -> None:
    """The choice depends only on the names, not on the order of the workers or on the process."""
    assert [rendezvous(key, WORKERS) for key in KEYS] == [rendezvous(key, WORKERS[::-1]) for key in KEYS]
    assert [rendezvous(key, WORKERS) for key in ("a", "b", "c")] == ["worker-14", "worker-2", "worker-3"]


def test_each_worker_gets_about_an_equal_share_of_the_keys() -> None:
    """Each worker gets an equal share of the keys, within a tenth."""
    counts = Counter(rendezvous(key, WORKERS) for key in KEYS)
    assert set(counts) == set(WORKERS)
    assert all(900 <= count <= 1100 for count in counts.values())


@pytest.mark.parametrize("gone", WORKERS[::5])
def test_if_a_worker_is_removed_only_its_keys_move(gone: str) -> None:
    """If a worker is removed, only its keys move, and they are spread over all other workers."""
    left = [worker for worker in WORKERS if worker != gone]
    before = {key: rendezvous(key, WORKERS) for key in KEYS}
    after = {key: rendezvous(key, left) for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
    assert {after[key] for key in KEYS if before[key] == gone} == set(left)
