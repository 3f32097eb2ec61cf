"""The streams of a NATS cluster: the leader of each stream, and the lag of its replicas."""

from typing import Any

import msgspec

from .jetstream import ask
from .patched_client import PatchedNatsClient

__all__ = ["StreamInfo", "list_streams", "parse_stream"]


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One stream at one moment."""

    name: str
    config: dict[str, Any]
    leader: str
    """Name of the stream's leader; empty: there is none, or the server is in no cluster."""
    replicas: int
    """Configured number of replicas, including the leader's."""
    others: int
    """Number of servers with a replica, without the leader."""
    behind: tuple[str, ...]
    """Other servers whose replica is incomplete or that are offline, as in `n1 (lags by 7)`."""

    @property
    def is_current(self) -> bool:
        """True if there is a leader and all replicas are complete."""
        return bool(self.leader) and not self.behind


async def list_streams(nats: PatchedNatsClient) -> tuple[tuple[StreamInfo, ...], tuple[str, ...]]:
    """Return all streams of this user's account by name, and the names of streams without a leader.

    Raises:
        ApiError: the server rejected the request.
        BusBroken: the server does not answer; `PermissionDenied`: this user is no admin.
    """
    found: dict[str, StreamInfo] = {}
    missing: set[str] = set()
    offset, total = 0, 1
    while offset < total:
        answer = await ask(nats, "STREAM.LIST", {"offset": offset})
        found |= {info["config"]["name"]: parse_stream(info) for info in answer.get("streams") or ()}
        missing.update(answer.get("missing") or ())
        total = answer["total"]
        offset += answer["limit"]
    return tuple(found[name] for name in sorted(found)), tuple(sorted(missing))


def parse_stream(info: dict[str, Any]) -> StreamInfo:
    """Parse the answer to `STREAM.INFO`, or one stream of a list. `CONSUMER.INFO` has the same form for its cluster."""
    config, cluster = info["config"], info.get("cluster") or {}
    return StreamInfo(
        name=config.get("name", ""),
        config=config,
        leader=cluster.get("leader", ""),
        replicas=config.get("num_replicas", 1),
        others=len(cluster.get("replicas") or ()),
        behind=tuple(_behind(one) for one in cluster.get("replicas") or () if _is_behind(one)),
    )


def _is_behind(replica: dict[str, Any]) -> bool:
    return bool(replica.get("offline") or not replica.get("current") or replica.get("lag"))


def _behind(replica: dict[str, Any]) -> str:
    if replica.get("offline"):
        return f"{replica['name']} (offline)"
    lag = replica.get("lag", 0)
    return f"{replica['name']} (lags by {lag})" if lag else f"{replica['name']} (not current)"
