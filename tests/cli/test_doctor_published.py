"""The findings of `doctor` about the buckets of published weights."""

from pathlib import Path

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.weights.chain import needed_bytes
from rollbus.bus.publish.versions import VersionStore
from rollbus.bus.subjects import Subjects
from rollbus.frontend.cli.doctor.host import Finding, Status
from rollbus.frontend.cli.doctor.server import DoctorTarget, examine_bus
from rollbus.schemas.control import UpdateWeights
from rollbus.schemas.weights import WeightSource
from tests.auth.support import FLEET, MODEL, UPLOAD_BYTES, guarded
from tests.support.connections import opened
from tests.support.versions import opened_store, publish, versions_bucket

MEGABYTE = 1024**2
CHECK = f"published weights of {MODEL}"


async def examined(url: str, fleet: str, creds: Path | None = None) -> Finding | None:
    """Return the finding about the published weights, if there is one."""
    target = DoctorTarget(url=url, creds=None if creds is None else str(creds), fleet=fleet)
    return {finding.check: finding async for finding in examine_bus(target)}.get(CHECK)


async def test_a_bucket_without_room_for_two_anchors_is_a_warning(nats_url: str) -> None:
    """A bucket without room for two anchors is a warning with used, needed and allowed bytes.

    Without versions, there is no finding.
    """
    async with opened(nats_url) as nats:
        for max_bytes, status in ((24 * MEGABYTE, Status.WARN), (32 * MEGABYTE, Status.OK)):
            async with versions_bucket(nats, max_bytes=max_bytes) as (fleet, _):
                await DesiredStore(nats, Subjects(fleet)).record(
                    MODEL, UpdateWeights(id="1", source=WeightSource(path="/x"), version=1)
                )
                assert await examined(nats_url, fleet) is None
                async with opened_store(nats_url, fleet) as store:
                    await publish(store, 7, content=bytes(10 * MEGABYTE))
                finding = await examined(nats_url, fleet)
                assert finding.status is status
                assert "version 7, " in finding.found
                assert "two anchors and the deltas between them need " in finding.found
                if status is Status.WARN:
                    assert (
                        f"rollbus make-queue {MODEL} --upload-bytes {needed_bytes(25 * MEGABYTE)}; " in finding.advice
                    )


@pytest.mark.slow
async def test_a_publisher_sees_its_own_models(tmp_path: Path) -> None:
    """A publisher sees the finding about its own models without violating its permissions.

    A trainer has no such finding.
    """
    async with guarded(tmp_path) as guard:
        store = VersionStore(guard.login("carol"), Subjects(FLEET), MODEL, publisher="carol")
        await store.open()
        await publish(store, 1, publisher="carol")
        await store.close()
        finding = await examined(guard.url, FLEET, guard.path("carol"))
        assert finding.status is Status.OK
        assert f"{UPLOAD_BYTES // MEGABYTE}" in finding.found
        assert await examined(guard.url, FLEET, guard.path("alice")) is None
        # `doctor` tests the permissions of each role, so violations of other subjects are expected.
        assert [line for line in guard.violations() if "OBJ_" in line or "$O." in line] == []
