"""Commands that only read from a worker: answered immediately and once, within the worker's rate limit."""

import pytest

from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import ReadExperts, ReadRequest
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.messages import decode_ack, encode_json
from rollbus.schemas.telemetry import ExpertCounts, ExpertLoad, RequestTimeline, TimelineEvent
from rollbus.workers.control.acks import cut_ack
from rollbus.workers.control.commands import READS_PER_S, TelemetryReads
from rollbus.workers.requests.steps import ExpertCounter
from rollbus.workers.requests.table import WorkerRequestTable
from tests.support.requests import endless
from tests.workers.support import StartControlled


@pytest.mark.proves("P96")
async def test_a_read_gets_one_final_ack_and_is_not_logged(controlled_worker: StartControlled) -> None:
    """A worker that is paused during a request answers a read with one final ack, and does not log the command."""
    async with controlled_worker() as (client, boss, worker, _):
        await client.begin(endless("r"))
        await boss.applied("pause")
        before = worker._control._log.under_way
        answer = await boss.do("read_request", request_id="r")
        await boss.applied("state")

        assert [ack.status for ack in boss.acks(answer.id)] == [AckStatus.APPLIED]
        assert answer.command == "read_request"
        assert [timeline.events[-1].event for timeline in answer.timelines] == ["held"]
        assert worker._control._log.find(answer.id) is None
        assert before == worker._control._log.under_way == []


@pytest.mark.proves("P96")
def test_reads_above_the_rate_limit_fail_with_the_limit() -> None:
    """The number of reads per second is limited. The error of the next read has the limit, and later reads succeed."""
    now = 10.0
    reads = TelemetryReads(ExpertCounter(), WorkerRequestTable(), lambda: now)

    for _ in range(READS_PER_S):
        assert reads.answer(ReadRequest(request_id="r")) == {"timelines": (), "timelines_left_out": 0}
    with pytest.raises(ControlError, match=f"allowed: {READS_PER_S} per second") as caught:
        reads.answer(ReadRequest(request_id="r"))
    assert caught.value.code is ControlCode.NOT_SERVING
    now += 1.0
    with pytest.raises(ControlError, match="the engine has not started"):
        reads.answer(ReadExperts())


def test_the_ack_of_a_read_fits_in_a_message() -> None:
    """If the timelines exceed the server's message size, the ack has the latest ones and the number of omitted ones."""
    event = TimelineEvent(at=1.0, event="held", reason="pause")
    timelines = tuple(RequestTimeline(request_id="r", client="c", child=n, events=(event,) * 64) for n in range(256))
    ack = Ack(
        id="x", command="read_request", worker="w", incarnation="w1", model="m", status=AckStatus.APPLIED,
        timelines=timelines, timelines_left_out=3,
    )  # fmt: skip

    told = decode_ack(cut_ack(ack, 100_000))

    assert len(encode_json(ack)) > 100_000
    assert len(encode_json(told)) <= 100_000
    assert told.timelines
    assert told.timelines_left_out == 3 + 256 - len(told.timelines)
    assert told.timelines == timelines[-len(told.timelines) :]


def test_counts_above_the_servers_limit_lose_their_oldest_versions() -> None:
    """Counts above the server's limit keep the newest versions.

    If one version alone is too large, the ack fails with the limit.
    """
    counts = tuple(ExpertCounts(weight_version=version, prompt=bytes(3000)) for version in (3, 2, 1))
    load = ExpertLoad(number=1, first=1, seconds=5.0, num_layers=1, num_experts=1, top_k=1, counts=counts)
    ack = Ack(
        id="c", command="read_experts", worker="w", incarnation="1", model="m", status=AckStatus.APPLIED, experts=load
    )
    cut, refused = decode_ack(cut_ack(ack, 9000)), decode_ack(cut_ack(ack, 1000))

    assert [one.weight_version for one in cut.experts.counts] == [3, 2]
    assert (refused.status, refused.experts) == (AckStatus.FAILED, None)
    assert "allowed by the NATS server's max_payload: 1000" in refused.error.message
