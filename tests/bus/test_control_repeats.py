"""When the controller repeats a command to workers that have not answered."""

from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollbus.bus.control import controller
from rollbus.bus.control.controller import MAX_REPEAT_S, REPEAT_S, AckCollector
from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.fleet.command_result import AckTracker
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.messages import encode_json
from tests.support.hand_control import ACCEPTED, APPLIED, controlled
from tests.support.presences import presence

SUBJECTS = Subjects("f")


def answer(status: AckStatus) -> Msg:
    """Return the ack of worker `w` for the command `c`."""
    ack = Ack(id="c", command="pause", worker="w", incarnation="w-1", model="m", status=status)
    return Msg(cast(Client, None), subject=SUBJECTS.ack("me", "w"), data=encode_json(ack))


async def test_new_acks_delay_the_repeat_of_a_command() -> None:
    """Each new ack delays the repeat of a command, up to a maximum. A repeated ack does not delay it."""
    asker = AckCollector(cast(Connection, None), SUBJECTS, "me")
    with asker.expecting(AckTracker("pause", "c", [presence(worker="w", incarnation="w-1", model="m")], 0.0)):
        [under_way] = asker._under_way.values()
        under_way.published_at = -1000.0
        assert under_way.repeat_at == -1000.0 + REPEAT_S
        await asker.receive(answer(AckStatus.ACCEPTED))
        heard_at = under_way.news_at
        await asker.receive(answer(AckStatus.ACCEPTED))
        assert under_way.news_at == heard_at
        assert under_way.repeat_at == -1000.0 + MAX_REPEAT_S
        under_way.published_at = heard_at - REPEAT_S / 2
        assert under_way.repeat_at == heard_at + REPEAT_S


async def test_endless_new_acks_do_not_prevent_the_repeat_of_a_lost_command(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of new acks does not prevent the repeat of a lost command."""
    monkeypatch.setattr(controller, "REPEAT_S", 3600.0)
    monkeypatch.setattr(controller, "MAX_REPEAT_S", 0.1)
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (ACCEPTED, APPLIED) if len(control["a"].heard) > 2 else ()

        assert (await control.rb.fleet.pause()).is_complete
