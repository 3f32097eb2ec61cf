"""The view of a client on its fleet: workers, queues, and commands of other controllers."""

from rollbus.bus.client.client import watch_fleet
from rollbus.bus.client.fleet_state import MAX_ACK_BYTES
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Pause
from rollbus.schemas.messages import encode_json
from tests.support.connections import opened
from tests.support.fleet import StartServed
from tests.support.waits import until_true


async def test_undecodable_messages_are_counted_and_ignored(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """The client counts messages that do not decode or that name another worker.

    It does not decode large acks and acks of reads.
    """
    subjects = Subjects(fleet)
    async with one_worker() as (rb, _, _), opened(nats_url) as nats:
        watch = watch_fleet(rb)
        await watch.listen()
        refused = "1"  # the id that the worker uses when it rejects the unknown command
        worker = rb.fleet.workers[0].worker
        for data in (b"", b"{", b"[]", b"\xff", b'{"command":"pause"}', b'{"command":"x","id":"1"}'):
            await nats.publish(subjects.control("eve"), data)
            await nats.publish(subjects.ack("eve", worker), data)
        forged = b'{"id":"1","command":"pause","worker":"other","incarnation":"","model":"m","status":"applied"}'
        await nats.publish(subjects.ack("eve", worker), forged)
        await nats.publish(subjects.ack("eve", worker), b'{"id":"1","command":"read_experts","experts":' + b"[" * 99)
        await nats.publish(subjects.ack("eve", worker), b"[" * (MAX_ACK_BYTES + 1))
        await nats.publish(subjects.control("eve"), encode_json(Pause(id="p", workers=("nobody",))))
        await nats.flush()
        await until_true(lambda: watch.bad_messages == 13)
        while not (lines := [line for line in await watch.commands() if line.id != refused]):
            pass
    assert [(line.id, line.workers, line.done) for line in lines] == [("p", {}, True)]


async def test_the_watch_contains_only_commands_between_listen_and_unlisten(one_worker: StartServed) -> None:
    """The watch contains only commands that arrived between `listen` and `unlisten`, and retains them afterwards."""
    async with one_worker() as (rb, _, _):
        watch = watch_fleet(rb)
        await rb.fleet.pause()
        await watch.listen()
        await watch.listen()
        heard = await rb.fleet.resume()
        while not (lines := await watch.commands()) or not lines[0].done:
            pass
        await watch.unlisten()
        await rb.fleet.pause()
        assert await watch.commands() == lines
    assert [line.id for line in lines] == [heard.id]
    assert lines[0].counts == {"applied": 1}
