"""A publisher that does not know whether its commit was stored."""

import pytest

import rollbus
from rollbus.bus.publish.chain_store import ChainKey
from rollbus.schemas.manifest import ChainRecord
from tests.control.support import MODEL
from tests.control.test_publishing import folders, stepped, weights


async def test_the_version_after_a_failed_but_stored_commit_is_an_anchor(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a commit that was stored but raised an error, the publisher publishes an anchor.

    It does not know the content of the last stored version, so it cannot compute a delta.
    """
    real = ChainKey.write
    lost: list[int | None] = []

    async def write(key: ChainKey, record: ChainRecord, sequence: int) -> int | None:
        stored = await real(key, record, sequence)
        if len(record.links) == 2 and not lost:
            lost.append(stored)
            raise rollbus.BusBroken("the test has lost the connection")
        return stored

    monkeypatch.setattr(ChainKey, "write", write)
    async with rollbus.connect(nats_url, fleet=fleet) as rb, rollbus.WeightPublisher(rb, model=MODEL) as publisher:
        await publisher.publish(weights(1), version=1, update=False)
        with pytest.raises(rollbus.BusBroken, match="the test has lost"):
            await publisher.publish(stepped(weights(1)), version=2, update=False)
        third = await publisher.publish(weights(1), version=3, update=False)
        assert third.is_anchor
        assert len(await folders(nats_url, fleet)) == 3
