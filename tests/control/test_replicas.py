"""The number of replicas of new streams, and changes of existing streams, on three real servers."""

import dataclasses
from pathlib import Path

import pytest

from rollbus.bus.control.replicas import ReplicaChange, set_replicas
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import connected
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.objects.writer import put_folder
from rollbus.frontend.cli.app import main
from rollbus.schemas.errors import BusBroken, InvalidRequest
from tests.support.nats_cluster import nats_cluster
from tests.support.nats_server import require_binary
from tests.support.patience import SOON_S

QUEUE = "rb~f~m"
ALL = {QUEUE, "rb~f~m~resume", "KV_rollbus", "OBJ_rollbus-f"}


async def changed(server: Server, count: int, **options: int) -> list[ReplicaChange]:
    """Return the changes of all streams, in the order in which the streams became current."""
    return [change async for change in set_replicas(server, "f", count, timeout_s=SOON_S, **options)]


async def replicas(server: Server) -> dict[str, int]:
    """Return the number of replicas of each stream and of the queue's consumers."""
    async with connected(server, name="test") as nats:
        found = {name: (await ask(nats, f"STREAM.INFO.{name}"))["config"]["num_replicas"] for name in ALL}
        consumer = (await ask(nats, f"CONSUMER.INFO.{QUEUE}.normal"))["cluster"]
        return found | {"consumer": 1 + len(consumer.get("replicas") or ())}


@pytest.mark.slow
async def test_replicas_are_raised_and_lowered_stream_by_stream(tmp_path: Path) -> None:
    """Streams are created with one replica as configured and raised to three, and objects are lowered to one.

    Streams of other fleets do not change.
    """
    require_binary()
    (tmp_path / "weights").write_bytes(b"1" * 1000)
    async with nats_cluster() as cluster:
        one = Server(",".join(cluster.urls), replicas=1)
        for fleet in ("f", "other"):
            await provision(one, fleet, ["m"])
        async with connected(one, name="test") as nats:
            await put_folder(nats, "rollbus-f", "v1", tmp_path, max_bytes=10**6)
        assert set((await replicas(one)).values()) == {1}

        three = await changed(one, 3)
        assert {change.stream for change in three} == ALL
        assert {(change.before, change.after) for change in three} == {(1, 3)}
        assert set((await replicas(one)).values()) == {3}
        assert {change.what for change in three} == {
            *("queue of m", "queue of m (resumed requests)"),
            *("desired states", "objects"),
        }
        lowered = await changed(one, 3, objects=1)
        assert {change.stream for change in lowered if change.before != change.after} == {"OBJ_rollbus-f"}
        assert (await replicas(one))["OBJ_rollbus-f"] == 1

        async with connected(one, name="test") as nats:
            assert (await ask(nats, "STREAM.INFO.rb~other~m"))["config"]["num_replicas"] == 1
        with pytest.raises(BusBroken, match="4 replicas of the desired states need as many servers in the cluster"):
            await changed(one, 4)
        # The default is three replicas on this cluster.
        await provision(dataclasses.replace(one, replicas=None), "third", ["m"])
        async with connected(one, name="test") as nats:
            assert (await ask(nats, "STREAM.INFO.rb~third~m"))["config"]["num_replicas"] == 3


async def test_a_server_without_a_cluster_has_one_replica(nats_url: str, fleet: str) -> None:
    """A server without a cluster creates streams with one replica, and rejects more with a message."""
    await provision(Server(nats_url), fleet, ["m"])
    async with connected(nats_url, name="test") as nats:
        assert (await ask(nats, f"STREAM.INFO.rb~{fleet}~m"))["config"]["num_replicas"] == 1
    with pytest.raises(BusBroken, match="3 replicas need as many servers; this one is in no cluster"):
        await changed(Server(nats_url), 3)
    with pytest.raises(BusBroken, match="replicas > 1 not supported in non-clustered mode"):
        await provision(Server(nats_url, replicas=3), fleet, ["another"])


def test_a_number_of_replicas_out_of_range_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, the environment and the library reject a number of replicas that is out of range."""
    with pytest.raises(InvalidRequest, match="replicas"):
        Server("a", replicas=6)
    monkeypatch.setenv("ROLLBUS_REPLICAS", "many")
    with pytest.raises(InvalidRequest, match=r"ROLLBUS_REPLICAS.*allowed: 1 to 5"):
        Server.named("a")
    monkeypatch.delenv("ROLLBUS_REPLICAS")
    assert main(["nats", "replicas", "6", "--nats", "nats://127.0.0.1:9"]) == 2
    assert main(["nats", "replicas"]) == 2
    assert "replicas requires a number" in capsys.readouterr().err
