"""Commands that only look inside a worker: answered at once and once, and not more often than the worker allows."""

import pytest

from rollbus.schemas.control import AckStatus, ReadExperts, ReadRequest
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.workers.control.reads import READS_PER_S, TelemetryReads
from rollbus.workers.requests.expert_counter import ExpertCounter
from tests.support.requests import endless
from tests.workers.support import StartControlled


@pytest.mark.slow
async def test_a_read_has_one_answer_and_is_not_kept(controlled_worker: StartControlled) -> None:
    """A worker that is paused in the middle of a request answers with one final ack; its log of commands stays."""
    async with controlled_worker() as (client, boss, worker, _):
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        await boss.applied("pause")
        before = repr(worker._control._log)
        answer = await boss.do("read_request", request_id="r")
        await boss.applied("state")

        assert [ack.status for ack in boss.acks(answer.id)] == [AckStatus.UNSUPPORTED]
        assert answer.command == "read_request"
        assert worker._control._log.find(answer.id) is None
        assert before == "<CommandLog under_way=0 ended=1>"


@pytest.mark.slow
async def test_a_read_for_another_worker_is_not_answered(controlled_worker: StartControlled) -> None:
    """Reads name workers and models as all commands do."""
    async with controlled_worker() as (_, boss, *_rest):
        others = await boss.command("read_experts", workers=["other"])
        of_another_model = await boss.command("read_experts", model="other")
        await boss.applied("state")

        assert not boss.acks(others)
        assert not boss.acks(of_another_model)


def test_a_flood_of_reads_is_refused_by_name() -> None:
    """Within a second so many reads are answered; the error of the next says what is allowed; then it goes on."""
    now = 10.0
    reads = TelemetryReads(ExpertCounter(), lambda: now)

    def code_of(read: ReadExperts | ReadRequest) -> ControlError:
        with pytest.raises(ControlError) as caught:
            reads.answer(read)
        return caught.value

    for _ in range(READS_PER_S):
        assert code_of(ReadRequest(request_id="r")).code is ControlCode.UNSUPPORTED
    refused = code_of(ReadRequest(request_id="r"))
    assert refused.code is ControlCode.NOT_SERVING
    assert f"allowed: {READS_PER_S} a second" in refused.message
    now += 1.0
    assert code_of(ReadExperts()).message == "the engine has not started"
