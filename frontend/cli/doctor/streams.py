"""Checks that only admins can run, of a fleet's streams: leaders, current replicas and per-client limits."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from ....bus.control.replicas import describe_stream, is_of_fleet
from ....bus.nats.connection import Connection
from ....bus.nats.jetstream import DEFAULT_REPLICAS, ApiError, Unanswered
from ....bus.nats.reachable import describe_reachable
from ....bus.nats.stream_info import StreamInfo, list_streams
from ....bus.subjects import Subjects
from ....schemas.errors import BusBroken
from .findings import Finding, fail, ok, warn

__all__ = ["NO_LEADER_ADVICE", "examine_streams"]

NO_LEADER_ADVICE: Final = "start the servers with its replicas; requests wait until more than half of the replicas run"


async def examine_streams(nats: Connection, fleet: str) -> AsyncIterator[Finding]:
    """Check each stream of the fleet."""
    subjects = Subjects(fleet)
    try:
        streams, missing = await list_streams(nats)
    except Unanswered:  # the check of JetStream reports this
        return
    except (BusBroken, ApiError) as error:
        yield fail(
            "streams", f"cannot be listed: {error}", "use an admin's credentials, or run `rollbus auth init` again"
        )
        return
    own = [stream for stream in streams if is_of_fleet(stream.name, subjects)]
    for name in missing:
        if is_of_fleet(name, subjects):
            found = f"has no leader: {await describe_reachable(nats)}"
            yield fail(describe_stream(name, {}), found, NO_LEADER_ADVICE)
    for stream in own:
        for finding in _stream(stream):
            yield finding
    few = [stream for stream in own if stream.replicas < DEFAULT_REPLICAS]
    if nats.is_in_cluster and few and len(nats.servers) >= DEFAULT_REPLICAS:
        names = ", ".join(f"{describe_stream(one.name, one.config)}: {one.replicas}" for one in few)
        yield warn(
            "replicas",
            f"fewer than {DEFAULT_REPLICAS} in a cluster of {len(nats.servers)} servers ({names})",
            "rollbus nats replicas 3; until then, the loss of one server can lose these streams",
        )
    if nats.is_in_cluster and own:
        leaders = Counter(stream.leader for stream in own if stream.leader)
        shown = ", ".join(f"{leader} leads {count}" for leader, count in sorted(leaders.items()))
        yield ok("streams", f"{len(own)} have a leader: {shown}")


def _stream(stream: StreamInfo) -> list[Finding]:
    what, found = describe_stream(stream.name, stream.config), []
    if stream.behind:
        found.append(
            warn(
                what,
                f"{stream.replicas - len(stream.behind)} of {stream.replicas} replicas are current; behind: "
                f"{', '.join(stream.behind)}",
                "wait until they are current before you stop another server; start the servers that do not run",
            )
        )
    has_share = stream.config.get("max_msgs_per_subject", -1) > 0 and stream.config.get("discard_new_per_subject")
    if stream.name.startswith("rb~") and not has_share:
        model = (stream.config.get("metadata") or {}).get("model", "MODEL")
        found.append(
            warn(
                what,
                "has no limit for each client: a client that floods it delays all others",
                f"rollbus make-queue {model} --max-per-client 1024",
            )
        )
    return found
