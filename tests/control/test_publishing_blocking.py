"""A publisher without asyncio, and a publisher without a server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbus
from rollbus.schemas.errors import InvalidRequest
from tests.control.support import MODEL, write_adapter
from tests.control.test_publishing import stepped, weights

pytestmark = pytest.mark.slow


def test_publish_blocking_draws_the_tensors_on_the_callers_thread(nats_url: str, fleet: str) -> None:
    """`publish_blocking` draws the tensors on the caller's thread."""
    threads = set()

    def drawn() -> Iterator[tuple[str, object]]:
        for item in weights(1).items():
            threads.add(threading.current_thread())
            yield item

    with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        with pytest.raises(rollbus.BusClosed, match="already open"):
            publisher.__enter__()
        assert publisher.publish_blocking(drawn(), version=1, update=False).is_anchor
        with pytest.raises(InvalidRequest, match="was given twice"):
            publisher.publish_blocking([*weights(1).items()] * 2, version=2, update=False)
        assert not publisher.publish_blocking(stepped(weights(1)), version=2, update=False).is_anchor
    assert threads == {threading.current_thread()}
    with pytest.raises(rollbus.BusClosed, match="publisher is not open"):
        publisher.publish_blocking(weights(1), version=3)


def test_publish_adapter_blocking_accepts_a_folder_or_tensors(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`publish_adapter_blocking` accepts a folder, and tensors that it draws on the caller's thread."""
    folder = write_adapter(tmp_path / "adapter")
    with rollbus.WeightPublisher(nats_url, fleet=fleet, model=MODEL) as publisher:
        first = publisher.publish_adapter_blocking("tuned", folder, version=1, update=False)
        second = publisher.publish_adapter_blocking("tuned", weights(1), version=2, config={"r": 2}, update=False)
    assert (first.num_tensors, second.num_tensors) == (2, 2)
    assert first.objects.rpartition("/")[0] == second.objects.rpartition("/")[0]


async def test_blocking_calls_work_on_the_thread_of_a_client(nats_url: str, fleet: str) -> None:
    """The client's thread works while the event loop of its caller is blocked."""
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        with rollbus.WeightPublisher(rb, model=MODEL) as publisher:
            assert publisher.last_version is None
            assert publisher.publish_blocking(weights(1), version=1, update=False).is_anchor
            assert publisher.last_version == 1


async def test_a_publisher_without_a_server_raises_bus_broken(fleet: str) -> None:
    """Without a server, a publisher raises `BusBroken`, as `connect` does."""
    with pytest.raises(rollbus.BusBroken), rollbus.WeightPublisher("nats://127.0.0.1:1", fleet=fleet, model=MODEL):
        pytest.fail("it is connected")
    with pytest.raises(rollbus.BusBroken):
        async with rollbus.WeightPublisher("nats://127.0.0.1:1", fleet=fleet, model=MODEL):
            pytest.fail("it is connected")
