"""How a denial by the server reaches the task that waits for it."""

import asyncio
import contextlib

import pytest

from rollbus.bus.nats.denials import Denials
from rollbus.schemas.errors import PermissionDenied

SUBJECT = "$JS.API.STREAM.CREATE.rb"
WORDS = f'Permissions Violation for Publish to "{SUBJECT}"'


async def publish(denials: Denials) -> None:
    """Wait for an answer that never arrives."""
    async with denials.expected(SUBJECT):
        await asyncio.sleep(60)


async def test_each_of_two_concurrent_publications_receives_its_own_denial() -> None:
    """Each of two concurrent publications receives its own denial, also if the block of the first has ended by then."""
    denials = Denials("worker w0")
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(refused(denials)) for _ in range(2)]
        await asyncio.sleep(0)
        assert denials.add(WORDS) is None
        await asyncio.wait(waiting[:1])
        assert not waiting[1].done()
        assert denials.add(WORDS) is None

    assert denials.first is None


async def test_a_denial_without_a_waiting_block_is_returned() -> None:
    """`add` returns a denial for which no block waits: another subject, or a block that has ended."""
    denials = Denials("worker w0")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await publish(denials)
    denial = denials.add(WORDS)

    assert denial is not None
    assert denial is denials.first
    assert (denial.action, denial.subject) == ("publish", SUBJECT)


async def refused(denials: Denials) -> None:
    """Wait until the publication is denied."""
    with pytest.raises(PermissionDenied, match="worker w0 may not publish on"):
        await publish(denials)
