"""The permissions that docs/operations.md recommends: they suffice, and they keep those from commanding who may not."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import bus
from bus import embedded
from bus.embedded import EmbeddedServer, server_config
from tests.cli.support import ROOT, run_rollbus
from tests.control.support import MODEL, ask, folders, start
from tests.support.nats_server import require_binary

pytestmark = pytest.mark.slow

FLEET = "F"
PASSWORD = "secret"
ROW = re.compile(r"^\| (?P<user>[^|]+) \| (?P<publish>[^|]+) \| (?P<subscribe>[^|]+) \|$", re.MULTILINE)


def documented() -> Iterator[tuple[str, list[str], list[str]]]:
    """Each row of the table: the user, and the subjects to publish and to subscribe."""
    text = (ROOT / "docs/operations.md").read_text()
    table = text.partition("<!-- table: permissions -->")[2].partition("<!-- end -->")[0]
    before: tuple[list[str], list[str]] = [], []
    for row in list(ROW.finditer(table))[1:]:
        publish, subscribe = (re.findall(r"`([^`]+)`", row[side]) for side in ("publish", "subscribe"))
        if row["publish"].startswith("also"):
            publish = before[0] + publish
        if row["subscribe"] == "the same":
            subscribe = before[1]
        before = publish, subscribe
        yield row["user"], publish, subscribe


def users() -> list[dict[str, Any]]:
    """The users of a server, by the table: a worker, a trainer, one that commands, and an administrator."""
    names = ["W", "C", "commands", "admin"]
    found = []
    for name, (_, publish, subscribe) in zip(names, documented(), strict=True):
        own = {side: [re.sub(r"\bC\b", name, subject) for subject in subjects] for side, subjects in
               (("publish", publish), ("subscribe", subscribe))}  # fmt: skip
        found.append({"user": name, "password": PASSWORD, "permissions": own})
    return found


@asynccontextmanager
async def guarded_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server whose users may do what the table says; yields its address without them."""

    def with_users(**fields: Any) -> str:
        config = json.loads(server_config(**fields))
        config["authorization"] = {"users": users()}
        return json.dumps(config)

    require_binary()
    monkeypatch.setattr(embedded, "server_config", with_users)
    async with EmbeddedServer() as server:
        yield server.url


def as_user(url: str, user: str) -> str:
    """The address with a user in it."""
    return url.replace("//", f"//{user}:{PASSWORD}@")


async def test_the_documented_permissions_suffice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker serves, a trainer gets answers, one that may commands, and `rollbus` updates weights with an upload."""
    one, two = folders(tmp_path)
    async with guarded_server(monkeypatch) as url, start(as_user(url, "W"), FLEET, "W", one):
        for user in ("C", "commands"):
            async with bus.connect(as_user(url, user), fleet=FLEET, client=user) as rb:
                await rb.fleet.wait_for_workers()
                assert (await rb.complete(ask())).error is None
                if user == "commands":
                    assert (await rb.fleet.pause()).is_complete
                    assert (await rb.fleet.resume()).is_complete
                    assert (await rb.fleet.update_weights(two, version=2, upload=True)).is_complete
        admin = as_user(url, "admin")
        ended = await run_rollbus(admin, FLEET, "update-weights", str(two), "--version", "3", "--upload")
        status = await run_rollbus(admin, FLEET, "status", "--json")

    assert (ended.code, ended.stderr) == (0, "")
    told = json.loads(status.stdout)
    assert [worker["weight_version"] for worker in told["workers"]] == [3]
    assert told["desired"][MODEL]["registers"]["weights"]["command"]["version"] == 3


async def test_a_trainer_without_the_right_cannot_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told so, nothing is recorded, and the worker goes on."""
    one, _ = folders(tmp_path)
    async with guarded_server(monkeypatch) as url, start(as_user(url, "W"), FLEET, "W", one):
        async with bus.connect(as_user(url, "C"), fleet=FLEET, client="C") as rb:
            await rb.fleet.wait_for_workers()
            with pytest.raises(bus.BusBroken, match=r"this user may not publish on \$KV\.rollbus\.F\.m"):
                await rb.fleet.pause()
        async with bus.connect(as_user(url, "admin"), fleet=FLEET) as rb:
            await rb.fleet.wait_for_workers()
            state = await rb.fleet.state()

    assert state.desired == {}
