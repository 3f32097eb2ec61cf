"""Commands of programs without this library: the example program, and the shell commands of docs/protocol.md."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from nats.aio.msg import Msg

from rollbus.bus.nats.connection import publish, subscribe
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.messages import decode_ack
from tests.protocol.protocol_doc import DOC
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import MODEL, hand_client
from tests.support.invariants import observing
from tests.support.nats_server import opened
from tests.support.patience import SOON_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_control.py"


async def test_the_example_program_pauses_and_resumes_every_worker(nats_url: str, fleet: str) -> None:
    """The example program pauses and resumes every worker of any model, and prints each ack."""
    async with (
        observing(nats_url, fleet) as observer,
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="a"),
        synthetic_worker(nats_url, fleet, worker_id="b", model="another"),
        asyncio.timeout(SOON_S),
    ):
        await client.until_serving("a", "b")
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), nats_url, fleet, stdout=PIPE, stderr=PIPE
        )
        stdout, stderr = await program.communicate()
        await client.until_serving("a", "b")
        await observer.check_at_rest()

    assert (program.returncode, stderr.decode()) == (0, "")
    lines = stdout.decode().splitlines()
    finals = [line.split() for line in lines if line.split()[2] == "applied"]
    assert sorted(finals) == [[worker, name, "applied"] for worker in "ab" for name in ("pause", "resume")]
    assert lines.index("a resume accepted ") > max(lines.index(f"{worker} pause applied ") for worker in "ab")


async def test_the_nats_commands_of_the_documentation_work(nats_url: str, fleet: str) -> None:
    """Each `nats pub` of docs/protocol.md is applied and answered on the subject of its `nats sub`."""
    typed = DOC.read_text().replace(".default.", f".{fleet}.")
    commands = re.findall(r"^nats pub (\S+) '(.*)'$", typed, re.MULTILINE)
    [listening] = re.findall(r"^nats sub '(\S+)'$", typed, re.MULTILINE)
    [key] = re.findall(r"^nats kv get rollbus default\.(\S+)$", typed, re.MULTILINE)
    acks: asyncio.Queue[Ack] = asyncio.Queue(100)

    async def take(message: Msg) -> None:
        acks.put_nowait(decode_ack(message.data))

    async with (
        observing(nats_url, fleet) as observer,
        hand_client(nats_url, fleet) as client,
        synthetic_worker(nats_url, fleet, worker_id="w", model=MODEL),
        opened(nats_url) as nats,
    ):
        await client.until_serving("w")
        await subscribe(nats, listening, take)
        for subject, payload in commands:
            await publish(nats, subject, payload.encode())
            said = [await acks.get()]
            while not said[-1].status.is_final:
                said.append(await acks.get())
            assert {ack.id for ack in said} == {json.loads(payload)["id"]}
            assert (said[0].status, said[-1].status) == (AckStatus.ACCEPTED, AckStatus.APPLIED)
        bucket = await nats.jetstream().key_value("rollbus")
        entry = await bucket.get(f"{fleet}.{key.replace('my-model', MODEL)}")
        await observer.check_at_rest()

    assert len(commands) == 4
    assert entry.value is not None
    assert json.loads(entry.value)["epoch"] == 3
