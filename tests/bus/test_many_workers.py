"""In a fleet of hundreds of workers, every worker answers every command and every query."""

import rollbus
from bench.processes import many_workers
from rollbus.schemas.acks import Ack, AckStatus
from tests.support.invariants import observing
from tests.support.patience import SOON_S

COUNT = 200


async def test_two_hundred_workers_ack_pause_and_resume(nats_url: str, fleet: str) -> None:
    """All 200 workers apply pause and resume with separate acks.

    Only the named worker applies a command for one worker.
    """
    async with (
        observing(nats_url, fleet) as observer,
        many_workers(nats_url, fleet, "w", COUNT) as workers,
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(COUNT)
        accepted: list[str] = []
        ledgers = [
            await rb.fleet.pause(on_ack=lambda ack: accepted.append(ack.worker) if _is_accepted(ack) else None),
            await rb.fleet.resume(),
        ]
        alone = await rb.fleet.pause(workers=["w7"])
        paused = [worker.presence().worker for worker in workers if worker.presence().pause_mode is not None]
        await rb.fleet.resume()
        trace = await rb.fleet.timelines("nothing", timeout_s=SOON_S)
        await observer.check_at_rest()

    names = {f"w{i}" for i in range(COUNT)}
    assert [set(ledger.applied) for ledger in ledgers] == [names, names]
    assert [ledger.epochs for ledger in (*ledgers, alone)] == [{"synthetic": 1}, {"synthetic": 2}, {"synthetic": 3}]
    assert sorted(accepted) == sorted(names)
    assert (trace.workers_asked, trace.workers_answered, trace.silent, trace.timelines) == (COUNT, COUNT, {}, ())
    assert (set(alone.applied), paused) == ({"w7"}, ["w7"])


def _is_accepted(ack: Ack) -> bool:
    return ack.status is AckStatus.ACCEPTED
