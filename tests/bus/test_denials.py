"""How a denial by the server reaches the task that waits for it."""

import asyncio
import contextlib

import pytest
from msgspec.structs import replace

from rollbus.bus.auth.credentials import Role, User
from rollbus.bus.auth.permissions import rules
from rollbus.bus.nats.failures import Denials
from rollbus.schemas.errors import PermissionDenied

SUBJECT = "$JS.API.STREAM.CREATE.rb"
WORDS = f'Permissions Violation for Publish to "{SUBJECT}"'


async def publish(denials: Denials) -> None:
    """Wait for an answer that never arrives."""
    async with denials.expected(SUBJECT):
        await asyncio.sleep(60)


async def test_each_of_two_concurrent_publications_receives_its_own_denial() -> None:
    """Each of two concurrent publications receives its own denial, also if the block of the first has ended by then."""
    denials = Denials(None)
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
    denials = Denials(None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await publish(denials)
    denial = denials.add(WORDS)

    assert denial is denials.first
    assert (denial.action, denial.subject) == ("publish", SUBJECT)


async def refused(denials: Denials) -> None:
    """Wait until the publication is denied."""
    with pytest.raises(PermissionDenied, match="a user without credentials may not publish on"):
        await publish(denials)


USER = User(fleet="F", role=Role.VIEWER, name="v", public_key="K")


@pytest.mark.parametrize(
    ("role", "action", "subject", "text"),
    [
        (
            Role.VIEWER,
            "publish",
            "rb.v1.F.req.v.m.normal",
            "send requests; roles that may: trainer, publisher, frontend",
        ),
        (Role.VIEWER, "publish", "rb.v1.F.req.~probe.m.low", "probe queues; roles that may: admin"),
        (Role.TRAINER, "publish", "rb.v1.F.req.other.m.low", "send requests under this name or for this model"),
        (Role.WORKER, "publish", "$KV.rollbus.F.m", "record commands; roles that may: frontend, admin"),
        (Role.VIEWER, "subscribe", "x.y", "subscribe to x.y"),
        (Role.VIEWER, "subscribe", ">", "subscribe to >"),
    ],
)
def test_a_denial_names_user_role_purpose_and_the_roles_that_may(
    role: Role, action: str, subject: str, text: str
) -> None:
    """A denial names the user, the role, the purpose and the roles that may. A traceback also shows the subject."""
    kind = "Publish" if action == "publish" else "Subscription"
    denial = Denials(replace(USER, role=role)).add(f'Permissions Violation for {kind} to "{subject}"')

    assert str(denial) == f"user v (role {role}) may not {text}"
    assert denial.__notes__ == [f"denied: {action} {subject}"]


def test_every_rule_has_a_purpose() -> None:
    """Each rule of the permissions states its purpose, because errors name it."""
    assert [rule.subject for rule in rules() if not rule.why] == []
