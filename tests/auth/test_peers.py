"""The comparison of a worker's start checkpoint with other workers, with users."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.auth import permissions
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control import content
from rollbus.workers.lifecycle import HEARTBEAT_S
from tests.auth.support import FLEET, MODEL, guarded
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_earlier", [False, True])
async def test_a_worker_compares_its_start_if_its_user_may_receive_presence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    """A worker whose user was created by an earlier release may not receive presence: it serves without comparison."""
    monkeypatch.setattr(content, "LISTEN_S", 1.25 * HEARTBEAT_S)
    if is_earlier:
        rules = (
            replace(rule, observe=frozenset()) if rule.subject == "presence.<worker>" else rule
            for rule in permissions.SUBJECT_RULES
        )
        monkeypatch.setattr(permissions, "SUBJECT_RULES", tuple(rules))
    folders = [str(write_checkpoint(tmp_path / str(fill), fill=fill)) for fill in (1, 2)]
    async with guarded(tmp_path / "users") as guard:

        def worker(number: int) -> contextlib.AbstractAsyncContextManager[object]:
            name = f"w{number}"
            return synthetic_worker(
                guard.url,
                FLEET,
                model=MODEL,
                worker_id=name,
                credentials=guard.credentials(name),
                model_path=folders[number],
                cache_dir=str(tmp_path / "cache"),
            )

        async with worker(0), rollbus.connect(guard.login("alice")) as rb:
            await rb.fleet.wait_for_workers()
            async with worker(1):
                expected = WorkerState.SERVING if is_earlier else WorkerState.OUTDATED
                second = await until_worker(rb, "w1", expected)

    assert (second.last_error is None) == is_earlier
