"""Uploads of checkpoints and adapters through NATS, and the time for which they are stored."""

import asyncio
import contextlib
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

import rollbus
from rollbus.bus.control.controller import Controller
from rollbus.bus.nats.connection import publish, subscribe
from rollbus.bus.nats.jetstream import ApiError, ask
from rollbus.bus.objects.catalog import list_objects
from rollbus.bus.objects.uploads import Uploads, sources_in
from rollbus.bus.objects.writer import put_folder
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import AnyCommand, CheckWeights, DesiredState, LoadLora, UpdateWeights
from rollbus.schemas.errors import BusBroken, ControlCode, ControlError
from rollbus.schemas.messages import decode_ack
from rollbus.schemas.weights import WeightSource
from tests.protocol.protocol_doc import DOC
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import MODEL, hand_client
from tests.support.hand_control import ACCEPTED, ControlledWorker, Controls, controlled, failed, unless
from tests.support.invariants import observing
from tests.support.nats_server import opened
from tests.support.requests import incomplete
from tests.support.waits import SOON_S, until


def _folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_text(text)
    return path


async def _uploads(control: Controls, fleet: str) -> set[str]:
    """Return the prefixes of the stored objects, without their random parts."""
    infos = await list_objects(control.nats, f"rollbus-{fleet}")
    return {info.name.rpartition("/")[0].rpartition("-")[0] for info in infos}


async def test_a_checkpoint_is_uploaded(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Workers receive the location in the object store.

    The bucket stores the upload of the recorded version and of the previous one.
    """
    async with controlled(nats_url, fleet, "a") as control:
        for version in (1, 2, 3):
            folder = _folder(tmp_path / str(version), f"weights {version}")
            await control.rb.fleet.update_weights(folder, version=version, upload=True)
        update = control["a"].heard[-1]

        assert isinstance(update, UpdateWeights)
        assert (update.source.objects or "").startswith(f"rollbus-{fleet}/m/weights/3-")
        assert await _uploads(control, fleet) == {"m/weights/2", "m/weights/3"}


async def test_the_upload_of_a_failed_update_is_deleted(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """An upload is deleted if a check fails or if all workers fail the update."""
    async with controlled(nats_url, fleet, "a") as control:
        folder = _folder(tmp_path / "ckpt", "weights")
        control["a"].reply = unless(CheckWeights, failed(ControlCode.BAD_SOURCE))
        await incomplete(control.rb.fleet.update_weights(folder, version=1, upload=True))
        assert await _uploads(control, fleet) == set()

        control["a"].reply = unless(UpdateWeights, failed(ControlCode.HALF_WRITTEN))
        await incomplete(control.rb.fleet.update_weights(folder, version=1, upload=True))
        assert await _uploads(control, fleet) == set()
        with pytest.raises(ControlError, match="nothing cannot be read"):
            await control.rb.fleet.update_weights(tmp_path / "nothing", version=1, upload=True)


async def test_a_cancelled_upload_leaves_no_chunk_in_the_store(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A cancelled upload leaves no chunk in the store, also if the client closes immediately, as on Ctrl-C."""
    folder = _folder(tmp_path / "ckpt", "x" * 2**26)
    stream = f"STREAM.INFO.OBJ_rollbus-{fleet}"

    async def num_stored() -> int:
        with contextlib.suppress(ApiError):
            return int((await ask(control.nats, stream))["state"]["messages"])
        return 0

    async def is_under_way() -> bool:
        return await num_stored() > 5

    async with controlled(nats_url, fleet, "a") as control:
        async with rollbus.connect(nats_url, fleet=fleet, client="you") as you:
            async with asyncio.TaskGroup() as tasks:
                updating = tasks.create_task(you.fleet.update_weights(folder, version=1, upload=True))
                await until(is_under_way, True)
                updating.cancel()
            assert updating.cancelled()
        assert await num_stored() == 0


async def test_an_upload_that_may_be_desired_again_stays(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """If a later update replaces an update, the upload of the earlier one stays.

    The desired state returns to the earlier update if the later one fails.
    """
    one, two = (_folder(tmp_path / name, name) for name in ("one", "two"))
    async with controlled(nats_url, fleet, "a") as control, rollbus.connect(nats_url, fleet=fleet, client="you") as you:
        control["a"].reply = unless(UpdateWeights, ACCEPTED)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(incomplete(control.rb.fleet.update_weights(one, version=1, upload=True)))
            overtaken = await _received_command(control["a"], UpdateWeights)
            controller = control["a"].controller
            second = tasks.create_task(incomplete(you.fleet.update_weights(two, version=2, upload=True)))
            failing = await _received_command(control["a"], UpdateWeights, version=2)
            other, control["a"].controller = control["a"].controller, controller
            await control["a"].ack(overtaken, status=AckStatus.STALE)
            assert list((await first).ledger.stale) == ["a"]
            control["a"].controller = other
            await control["a"].ack(failing, **failed(ControlCode.BAD_SOURCE))
            assert "was restored" in str(await second)

        state = await control.store.read("m")
        assert [objects.partition("-")[0] for objects in _names_in(state)] == ["1"]
        assert await _uploads(control, fleet) == {"m/weights/1"}


async def test_an_upload_whose_recording_was_not_confirmed_stays(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload stays if the recording of its command was not confirmed, because the command may be recorded."""

    async def fail(*_: object) -> None:
        raise BusBroken("cut off")

    async with controlled(nats_url, fleet, "a") as control:
        monkeypatch.setattr(Controller, "_record", fail)
        with pytest.raises(BusBroken):
            await control.rb.fleet.update_weights(_folder(tmp_path / "x", "x"), version=1, upload=True)
        assert await _uploads(control, fleet) == {"m/weights/1"}


async def test_prune_removes_only_earlier_uploads(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`prune` removes only uploads from before its own.

    A later upload of an older version belongs to a rollback of another controller.
    """
    uploads = Uploads(nats_url, Subjects(fleet))
    folder = _folder(tmp_path / "ckpt", "weights")

    async def put(version: int) -> UpdateWeights:
        update = UpdateWeights(version=version, source=WeightSource(path=str(folder)))
        return replace(update, source=WeightSource(objects=await uploads.put("m", update, folder)))

    async with controlled(nats_url, fleet) as control:
        _, own, _, _ = [await put(version) for version in (1, 3, 2, 4)]
        await uploads.prune("m", own, set())
        assert await _uploads(control, fleet) == {"m/weights/2", "m/weights/3", "m/weights/4"}


async def test_uploads_of_dead_controllers_are_deleted(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sweep` deletes a model's uploads that nobody has recorded for a day, whatever their version or adapter."""
    uploads, folder = Uploads(nats_url, Subjects(fleet)), _folder(tmp_path / "ckpt", "weights")
    source = WeightSource(path=str(folder))
    async with controlled(nats_url, fleet) as control:
        kept, *_ = [
            await uploads.put("m", command, folder)
            for command in (
                UpdateWeights(version=1, source=source),
                UpdateWeights(version=2, source=source),
                LoadLora(name="x/y", version=1, source=source),
            )
        ]
        await uploads.sweep("m", {kept})
        before = await _uploads(control, fleet)
        monkeypatch.setattr("rollbus.bus.objects.uploads.ABANDONED_S", -60.0)
        await uploads.sweep("other", set())
        await uploads.sweep("m", {kept})
        assert before == {"m/weights/1", "m/weights/2", "m/loras/x=2Fy/1"}
        assert await _uploads(control, fleet) == {"m/weights/1"}


async def test_an_old_upload_that_may_be_desired_again_stays(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old upload of the previous version stays while an update is open, which the workers may still refuse."""
    monkeypatch.setattr("rollbus.bus.objects.uploads.ABANDONED_S", -60.0)
    folder = _folder(tmp_path / "ckpt", "weights")
    async with controlled(nats_url, fleet, "a") as control, rollbus.connect(nats_url, fleet=fleet, client="you") as you:
        await control.rb.fleet.update_weights(folder, version=1, upload=True)
        control["a"].reply = unless(UpdateWeights, ACCEPTED)
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(incomplete(you.fleet.update_weights("/two", version=2)))
            open_update = await _received_command(control["a"], UpdateWeights, version=2)
            await control.rb.fleet.load_lora("x", folder, upload=True)
            control["a"].controller = "you"
            await control["a"].ack(open_update, **failed(ControlCode.BAD_SOURCE))
            assert "was restored" in str(await second)
        assert "m/weights/1" in await _uploads(control, fleet)


def _names_in(state: DesiredState) -> list[str]:
    """Return the names of the uploads in a desired state."""
    return [objects.rpartition("/")[2] for objects in sources_in(state)]


async def _received_command(worker: ControlledWorker, kind: type[AnyCommand], *, version: int = 1) -> AnyCommand:
    """Return the next command of a type that a worker receives."""
    while True:
        command = await worker.waiting.get()
        if isinstance(command, kind) and getattr(command, "version", version) == version:
            return command


async def test_an_adapter_is_uploaded(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """The uploads of each adapter are separate from those of other adapters and of weights."""
    async with controlled(nats_url, fleet, "a") as control:
        folder = _folder(tmp_path / "x", "adapter")
        for _ in range(3):
            await control.rb.fleet.load_lora("org/x", folder, upload=True)
        await control.rb.fleet.load_lora("y", folder, upload=True)

        assert await _uploads(control, fleet) == {"m/loras/org=2Fx/2", "m/loras/org=2Fx/3", "m/loras/y/1"}


async def test_unloading_an_adapter_deletes_its_uploads(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Unloading an adapter deletes its uploads, so new adapter names do not fill the store.

    Objects of another program stay.
    """
    async with controlled(nats_url, fleet, "a") as control:
        folder = _folder(tmp_path / "x", "adapter")
        own = await put_folder(control.nats, f"rollbus-{fleet}", "mine", folder)
        for name in ("step-1", "step-2"):
            await control.rb.fleet.load_lora(name, folder, upload=True)
        await control.rb.fleet.load_lora("other", objects=own)
        for name in ("step-1", "other"):
            await control.rb.fleet.unload_lora(name)

        assert await _uploads(control, fleet) == {"m/loras/step-2/1", ""}


# Commands of programs without this library: the example program, and the shell commands of docs/protocol.md.


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
    assert json.loads(entry.value)["epoch"] == 3
