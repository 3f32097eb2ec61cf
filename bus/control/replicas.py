"""Changes the number of replicas of a fleet's streams, one stream at a time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from ...schemas.checks import check_int
from ...schemas.errors import BusBroken, PermissionDenied
from ..nats.client import PatchedNatsClient
from ..nats.connection import connected
from ..nats.jetstream import NO_PEERS, ApiError, StreamInfo, Unanswered, ask, list_streams, parse_stream
from ..nats.server import MAX_REPLICAS, Server
from ..objects.layout import stream_of
from ..queue.streams import STREAM_LANES
from ..subjects import BUCKET, Subjects

LOOK_AGAIN_S: Final = 0.5
"""Seconds between checks of a stream whose replicas are being copied. Copying an empty stream takes about 1 s."""
OBJECTS: Final = "objects"


class ReplicaChange(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one stream."""

    stream: str
    what: str
    """Content of the stream, for example `queue of m`."""
    before: int
    after: int
    leader: str


async def set_replicas(
    server: Server, fleet: str, count: int, *, objects: int | None = None, timeout_s: float
) -> AsyncIterator[ReplicaChange]:
    """Set the replicas of the fleet's queues, desired states and objects. Yield each stream once it is current.

    A stream is changed only when all earlier streams are current, because copying loads the servers. An error leaves
    the remaining streams unchanged.

    Args:
        objects: replicas of uploaded objects, which can be uploaded again; None: `count`.
        timeout_s: seconds for each stream to become current.

    Raises:
        InvalidRequest: a number is out of range.
        BusBroken: the servers are no cluster or fewer than `count`, this user is no admin, or a stream has no leader or
            does not become current in time. Streams that were yielded stay changed.
    """
    check_int("replicas", count, 1, MAX_REPLICAS)
    objects = count if objects is None else check_int("objects", objects, 1, MAX_REPLICAS)
    subjects = Subjects(fleet)
    async with connected(server, name=f"rollbus replicas {fleet}") as nats:
        if not nats.is_in_cluster and max(count, objects) > 1:
            raise BusBroken(f"{max(count, objects)} replicas need as many servers; this one is in no cluster")
        for stream in await _streams(nats, subjects):
            what = describe_stream(stream.name, stream.config)
            wanted = objects if what.startswith(OBJECTS) else count
            after = await _change(nats, stream, what, wanted, timeout_s)
            yield ReplicaChange(
                stream=stream.name, what=what, before=stream.replicas, after=after.replicas, leader=after.leader
            )


def is_of_fleet(stream: str, subjects: Subjects) -> bool:
    """Return True if rollbus created the stream of this name for the fleet, or for all fleets."""
    fleet = subjects.fleet
    return stream.startswith(f"rb~{fleet}~") or stream in {f"KV_{BUCKET}", stream_of(f"{BUCKET}-{fleet}")}


def describe_stream(name: str, config: dict[str, Any]) -> str:
    """Return the content of a stream for which `is_of_fleet` is true.

    Args:
        config: configuration of the stream. Empty: unknown; a queue is then described by the name of its stream.
    """
    model = (config.get("metadata") or {}).get("model", name)
    if name == f"KV_{BUCKET}":
        return "desired states"
    if name.startswith("OBJ_"):
        return OBJECTS
    return f"queue of {model}" + (" (resumed requests)" if name.endswith("~resume") else "")


async def _streams(nats: PatchedNatsClient, subjects: Subjects) -> list[StreamInfo]:
    try:
        streams, missing = await list_streams(nats)
    except PermissionDenied as error:
        raise BusBroken(f"{error}; only an admin may change replicas (--creds FILE)") from error
    except ApiError as error:
        raise BusBroken(f"the streams cannot be listed: {error}") from error
    if missing:
        raise BusBroken(f"{', '.join(missing)} have no leader. Start their servers first; nothing was changed")
    return [stream for stream in streams if is_of_fleet(stream.name, subjects)]


async def _change(nats: PatchedNatsClient, stream: StreamInfo, what: str, wanted: int, timeout_s: float) -> StreamInfo:
    try:
        if stream.replicas != wanted:
            await ask(nats, f"STREAM.UPDATE.{stream.name}", {**stream.config, "num_replicas": wanted})
        return await _current(nats, stream.name, what, wanted, timeout_s)
    except ApiError as error:
        if error.code == NO_PEERS:
            raise BusBroken(
                f"{wanted} replicas of the {what} need as many servers in the cluster, with room for it: {error}"
            ) from error
        raise BusBroken(f"the replicas of the {what} cannot be changed: {error}") from error


def _consumers(stream: str) -> list[str]:
    """Return the API requests for the consumers of a stream. Only queues have consumers, one for each lane."""
    if not stream.startswith("rb~"):
        return []
    lanes = next(lanes for lanes in STREAM_LANES if ("resume" in lanes) == stream.endswith("~resume"))
    return [f"CONSUMER.INFO.{stream}.{lane}" for lane in lanes]


async def _current(nats: PatchedNatsClient, name: str, what: str, wanted: int, timeout_s: float) -> StreamInfo:
    """Wait until a stream has all its replicas, and each is current."""
    seen = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    stream = parse_stream(await ask(nats, f"STREAM.INFO.{name}"))
                    # Consumers have their own replicas, which become current after those of their stream.
                    clusters = [stream, *[parse_stream(await ask(nats, one)) for one in _consumers(name)]]
                except Unanswered as error:  # the stream elects a leader
                    seen = str(error)
                else:
                    if all(one.others == wanted - 1 and not one.behind for one in clusters):
                        return stream
                    behind = sorted({server for one in clusters for server in one.behind})
                    seen = f"not current: {', '.join(behind) or 'servers that were not chosen yet'}"
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        raise BusBroken(f"the {what} has fewer than {wanted} current replicas after {timeout_s:g} s: {seen}") from None
