"""The signature of an upload covers the whole folder: no file can be changed, added, removed or borrowed."""

import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from rollbus.bus.auth.credentials import SIGNED, Signatures
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ask, headers_of, put
from rollbus.bus.objects.catalog import ensure_bucket
from rollbus.bus.objects.layout import info_subject
from rollbus.bus.objects.writer import put_folder, sign_folder
from rollbus.schemas.errors import ControlCode, ControlError
from tests.auth.support import FLEET, Guarded, guarded
from tests.support.fetching import fetch_folder
from tests.support.objects import files_in, write_folder

pytestmark = pytest.mark.slow

BUCKET = f"rollbus-{FLEET}"
MEGABYTE = 1024**2

Attack = Callable[[Guarded, Connection], Awaitable[None]]


async def stored(nats: Connection, name: str) -> tuple[bytes, str]:
    """Return an object's description and its signature."""
    answer = await ask(nats, f"STREAM.MSG.GET.OBJ_{BUCKET}", {"last_by_subj": info_subject(BUCKET, name)})
    return base64.b64decode(answer["message"]["data"]), headers_of(answer["message"]).get(SIGNED, "")


async def overwrite(nats: Connection, name: str, data: bytes, signature: str) -> None:
    """Replace the description of an object."""
    headers = {"Nats-Rollup": "sub"} | ({SIGNED: signature} if signature else {})
    await put(nats, info_subject(BUCKET, name), data, headers)


async def change(_guard: Guarded, nats: Connection) -> None:
    """Let the description name the chunks of another object."""
    data, signature = await stored(nats, "m/one/a")
    other, _ = await stored(nats, "m/two/a")
    fields = json.loads(data) | {"nuid": json.loads(other)["nuid"], "digest": json.loads(other)["digest"]}
    await overwrite(nats, "m/one/a", json.dumps(fields).encode(), signature)


async def unsign(_guard: Guarded, nats: Connection) -> None:
    """Store the same description without its signature."""
    data, _ = await stored(nats, "m/one/a")
    await overwrite(nats, "m/one/a", data, "")


async def leave_out(_guard: Guarded, nats: Connection) -> None:
    """Delete the description."""
    await ask(nats, f"STREAM.PURGE.OBJ_{BUCKET}", {"filter": info_subject(BUCKET, "m/one/a")})


async def borrow(_guard: Guarded, nats: Connection) -> None:
    """Store the signed description of another upload."""
    data, signature = await stored(nats, "m/two/a")
    await overwrite(nats, "m/one/a", data, signature)


async def sign_as_publisher(guard: Guarded, nats: Connection) -> None:
    """Store the description with the signature of a user that may send other commands only."""
    data, _ = await stored(nats, "m/one/a")
    headers = Signatures(guard.credentials("carol")).headers(info_subject(BUCKET, "m/one/a"), data)
    await overwrite(nats, "m/one/a", data, headers[SIGNED])


async def put_back(_guard: Guarded, nats: Connection) -> None:
    """Store a signed description of a deleted upload with the same name."""
    data, signature = await stored(nats, "m/one/a")
    fields = json.loads(data)
    fields["metadata"] = {"rollbus-folder": "0" * 32}
    subject = info_subject(BUCKET, "m/one/a")
    data = msgspec.json.encode(fields)
    signature = nats.signatures.headers(subject, data)[SIGNED]
    await overwrite(nats, "m/one/a", data, signature)


@pytest.mark.parametrize("attack", [change, unsign, leave_out, borrow, sign_as_publisher, put_back])
async def test_a_folder_that_differs_from_the_signed_folder_is_refused(attack: Attack, tmp_path: Path) -> None:
    """A worker rejects a folder that differs from the signed one with `bad_source`, and stores nothing."""
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        for name in ("one", "two"):
            await put_folder(boss, BUCKET, f"m/{name}", write_folder(tmp_path / name, a=1000, b=3000))
        await attack(guard, boss)
        with pytest.raises(ControlError) as caught:
            await fetch_folder(guard.login("w0"), f"{BUCKET}/m/one", tmp_path / "cache")

    assert caught.value.code is ControlCode.BAD_SOURCE
    assert not (tmp_path / "cache").exists()


async def test_a_worker_ignores_an_unsigned_file_in_a_signed_folder(tmp_path: Path) -> None:
    """A worker ignores an unsigned file that was added to a signed folder."""
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        objects = await put_folder(boss, BUCKET, "m/one", write_folder(tmp_path / "one", a=1000))
        data, _ = await stored(boss, "m/one/a")
        added = json.loads(data) | {"name": "m/one/b"}
        await overwrite(boss, "m/one/b", json.dumps(added).encode(), "")
        fetched = await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")

    assert files_in(fetched) == files_in(tmp_path / "one")


async def test_a_folder_that_was_stored_without_a_signature_can_be_signed(tmp_path: Path) -> None:
    """An admin can sign a folder that was stored without a signature, for example by NATS's own tools.

    A worker cannot sign it.
    """
    async with guarded(tmp_path / "auth") as guard, guard.connected("boss") as boss, guard.connected("w0") as worker:
        await ensure_bucket(boss, BUCKET, max_bytes=64 * MEGABYTE)
        own, boss.signatures = boss.signatures, Signatures(None)
        objects = await put_folder(boss, BUCKET, "m/one", write_folder(tmp_path / "one", a=1000, b=0))
        boss.signatures = own
        with pytest.raises(ControlError, match="has no signed objects below 'm/one'"):
            await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")
        with pytest.raises(ControlError, match="use the credentials of an admin"):
            await sign_folder(worker, objects)
        assert await sign_folder(boss, objects) == 2
        fetched = await fetch_folder(guard.login("w0"), objects, tmp_path / "cache")

    assert files_in(fetched) == files_in(tmp_path / "one")
