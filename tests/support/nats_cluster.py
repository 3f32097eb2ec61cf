"""A JetStream cluster of three nats-servers, whose servers and routes tests break.

    async with nats_cluster() as cluster:
        ...worker at cluster.urls[0], client at cluster.urls[1]...
        await cluster.replicate()
        await cluster.servers[await cluster.leader("KV_rollbus")].kill()

Each route leads through its own TCP proxy. So a test can partition the servers while their clients stay connected.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rollbus.bus.auth.credentials import User
from rollbus.bus.nats import embedded
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.embedded import EmbeddedServer, server_config
from rollbus.bus.nats.jetstream import NO_PEERS, ApiError, Unanswered, ask
from rollbus.schemas.errors import BusBroken
from tests.support.nats_server import opened
from tests.support.tcp_proxy import TcpProxy
from tests.support.waits import patient, until, until_true

NAMES = ("n0", "n1", "n2")
"""The server names, in order."""
NOWHERE = "127.0.0.1:9"
"""The address that servers advertise to each other, so that no route bypasses the proxies."""
LOOK_AGAIN_S = 0.1
"""Seconds between two looks, each of which asks all servers, for elections and copies that take seconds."""
LOOK_S = patient(5.0)
"""Timeout of one monitoring request; a stopped server does not answer."""


@contextlib.asynccontextmanager
async def nats_cluster(
    *, users: Iterable[User] | None = None, tls: Mapping[str, str] | None = None
) -> AsyncIterator["NatsCluster"]:
    """Run three connected servers with a leader.

    Args:
        users: users with access. None gives everyone full access.
        tls: the `tls` block of the configuration; None: clients connect without TLS.
    """
    known = None if users is None else tuple(users)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollbus-cluster-")))
        routes = await stack.enter_async_context(_routes())
        servers = [EmbeddedServer(store_dir=folder / name, users=known) for name in NAMES]
        cluster = NatsCluster(servers, routes)
        stack.enter_context(cluster.configured(tls))
        for index, server in enumerate(servers):
            await stack.enter_async_context(server)
            await cluster.learn_ports(index)
        stack.callback(cluster.go_on)
        await cluster.ready()
        yield cluster


class NatsCluster:
    """The servers and the routes between them; `nats_cluster` creates it.

    Attributes:
        servers: the servers, each an `EmbeddedServer`, which a test can kill, stop and restart with its store.
    """

    def __init__(self, servers: list[EmbeddedServer], routes: dict[tuple[int, int], TcpProxy]) -> None:
        self.servers = servers
        self._routes = routes
        self._ports: list[tuple[int, int]] = [(-1, -1)] * len(servers)
        self._stopped: set[int] = set()

    def __repr__(self) -> str:
        """Return the running and the stopped servers on one line."""
        running = [NAMES[index] for index in range(len(NAMES)) if self.servers[index].is_running]
        return f"<NatsCluster running={running} stopped={sorted(self._stopped)}>"

    @property
    def urls(self) -> list[str]:
        """The client URL of each server; each server advertises the others to its clients."""
        return [server.url for server in self.servers]

    @contextlib.contextmanager
    def configured(self, tls: Mapping[str, str] | None = None) -> Iterator[None]:
        """Make embedded servers with these stores form the cluster."""

        def changed(*, listen: str, store_dir: str, max_payload_bytes: int) -> str:
            text = server_config(listen=listen, store_dir=store_dir, max_payload_bytes=max_payload_bytes)
            name = Path(store_dir).name
            if name not in NAMES:
                return text
            index = NAMES.index(name)
            route_port, monitor_port = self._ports[index]
            cluster = {
                "name": "test",
                "listen": f"127.0.0.1:{route_port}",
                "advertise": NOWHERE,
                "routes": [self._routes[pair].url for pair in self._routes if pair[0] == index],
            }
            more = {"server_name": name, "cluster": cluster, "http": f"127.0.0.1:{monitor_port}"}
            return json.dumps({**json.loads(text), **more, **({} if tls is None else {"tls": tls})})

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(embedded, "server_config", changed)
            yield

    async def learn_ports(self, index: int) -> None:
        """Store the ports that a server chose at its first start, and connect the other servers' routes to it."""
        ports = []
        for words in ("route connections", "http monitor"):
            pattern = re.compile(rf"{words} on 127\.0\.0\.1:(\d+)")
            await until_true(lambda pattern=pattern: pattern.search(self.servers[index].log_tail()))  # type: ignore[misc]
            found = pattern.search(self.servers[index].log_tail())
            ports.append(int(found[1]))
        self._ports[index] = ports[0], ports[1]
        for (_, to), proxy in self._routes.items():
            if to == index:
                proxy.lead_to(f"nats://127.0.0.1:{ports[0]}")

    def stop(self, index: int) -> None:
        """Freeze a server with SIGSTOP, like a machine that hangs; its connections stay open."""
        self._stopped.add(index)
        os.kill(self.servers[index].pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the frozen servers."""
        for index in self._stopped:
            if self.servers[index].is_running:
                os.kill(self.servers[index].pid, signal.SIGCONT)
        self._stopped.clear()

    def isolate(self, *indexes: int, silently: bool = False) -> None:
        """Partition these servers from the others, but not from each other.

        Args:
            silently: hold back bytes on open connections; if False, close connections and refuse new ones.
        """
        for (one, other), proxy in self._routes.items():
            if (one in indexes) != (other in indexes):
                if silently:
                    proxy.freeze()
                else:
                    proxy.cut()

    async def heal(self) -> None:
        """Restore all routes."""
        for proxy in self._routes.values():
            if not proxy.is_open:
                await proxy.restore()
            proxy.thaw()

    async def ready(self) -> None:
        """Wait until all running servers know the same leader and are current."""
        await until(self._are_current, expected=True, again_s=LOOK_AGAIN_S)

    async def _are_current(self) -> bool:
        running = self._running()
        metas = {NAMES[index]: await self._meta(index) for index in running}
        leaders = {meta.get("leader") for meta in metas.values()}
        if len(leaders) != 1 or not leaders <= set(metas):
            return False
        # Only the leader knows the state of the other servers.
        peers = {peer["name"]: peer for peer in metas[leaders.pop()].get("replicas") or ()}
        current = {name for name, peer in peers.items() if peer["current"] and not peer.get("offline")}
        return len(peers) == len(NAMES) - 1 and len(current & set(metas)) == len(metas) - 1

    def _running(self) -> list[int]:
        return [index for index, server in enumerate(self.servers) if server.is_running and index not in self._stopped]

    async def _meta(self, index: int) -> dict[str, Any]:
        meta: dict[str, Any] = (await self._get_json(index, "jsz")).get("meta_cluster") or {}
        return meta

    async def meta_leader(self) -> int:
        """Wait for the leader that places streams and consumers; return its index."""
        found: list[str] = []

        async def is_known() -> bool:
            leaders = {(await self._meta(index)).get("leader") for index in self._running()} - {None, ""}
            found[:] = [str(leader) for leader in leaders]
            return len(leaders) == 1

        await until(is_known, expected=True, again_s=LOOK_AGAIN_S)
        return NAMES.index(found[0])

    async def lead(self, stream: str, index: int) -> None:
        """Make a server the leader of a stream with three replicas; requires servers without users."""
        async with opened(self.urls[index]) as connection:

            async def leads() -> bool:
                if await self.leader(stream) == index:
                    return True
                wanted = {"placement": {"preferred": NAMES[index]}}
                with contextlib.suppress(ApiError, BusBroken):
                    await ask(connection, f"STREAM.LEADER.STEPDOWN.{stream}", wanted)
                return False

            await until(leads, expected=True, again_s=LOOK_AGAIN_S)

    async def leader(self, stream: str, consumer: str | None = None) -> int:
        """Wait for the leader of a stream or of one of its consumers; return its index."""
        found: list[str] = []

        async def is_known() -> bool:
            leaders = [await self._leader_at(index, stream, consumer) for index in self._running()]
            found[:] = [leader for leader in leaders if leader]
            return len(set(found)) == 1 and NAMES.index(found[0]) in self._running()

        await until(is_known, expected=True, again_s=LOOK_AGAIN_S)
        return NAMES.index(found[0])

    async def _leader_at(self, index: int, stream: str, consumer: str | None) -> str:
        seen = await self._get_json(index, "jsz?accounts=true&streams=true&consumers=true")
        for account in seen.get("account_details") or ():
            for one in account.get("stream_detail") or ():
                if one["name"] != stream:
                    continue
                details = [one] if consumer is None else one.get("consumer_detail") or ()
                for detail in details:
                    if detail["name"] == (consumer or stream):
                        return str(detail.get("cluster", {}).get("leader", ""))
        return ""

    async def _get_json(self, index: int, path: str) -> dict[str, Any]:
        """Return the monitoring answer of a server, or an empty dict if it does not answer."""

        def get() -> dict[str, Any]:
            url = f"http://127.0.0.1:{self._ports[index][1]}/{path}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=LOOK_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
            return {}

        return await asyncio.to_thread(get)

    async def replicate(self) -> None:
        """Give each stream three current replicas; requires servers without users."""
        async with opened(self.urls[self._running()[0]]) as connection:
            await replicate(connection)


async def replicate(connection: Connection) -> None:
    """Give each stream of the connection's account three current replicas."""

    async def lagging() -> list[str]:
        try:
            return await _replicate(connection)
        except Unanswered as error:  # for example during a leader election
            return [str(error)]
        except ApiError as error:
            # For a moment after the start, the leader may count a server as offline.
            if error.code != NO_PEERS:
                raise
            return [str(error)]

    await until(lagging, [], again_s=LOOK_AGAIN_S)


async def _replicate(connection: Connection) -> list[str]:
    """Request three replicas of each stream; return the streams and consumers with fewer current replicas."""
    infos = []
    for name in (await ask(connection, "STREAM.NAMES"))["streams"] or []:
        info = await ask(connection, f"STREAM.INFO.{name}")
        if info["config"]["num_replicas"] < len(NAMES):
            await ask(connection, f"STREAM.UPDATE.{name}", {**info["config"], "num_replicas": len(NAMES)})
        # The consumers of a stream get their replicas later than the stream.
        consumers = (await ask(connection, f"CONSUMER.NAMES.{name}"))["consumers"] or []
        infos += [info, *[await ask(connection, f"CONSUMER.INFO.{name}.{consumer}") for consumer in consumers]]
    return [
        info.get("name") or info["config"]["name"]
        for info in infos
        # A server that has just got a replica may not show it yet.
        if not info.get("cluster", {}).get("leader")
        or sum(replica["current"] for replica in info["cluster"].get("replicas") or ()) < len(NAMES) - 1
    ]


@contextlib.asynccontextmanager
async def _routes() -> AsyncIterator[dict[tuple[int, int], TcpProxy]]:
    """Run a proxy for each ordered pair of servers; the proxies have no target yet."""
    async with asyncio.TaskGroup() as tasks:
        pairs = [(one, other) for one in range(len(NAMES)) for other in range(len(NAMES)) if one != other]
        routes = {pair: TcpProxy(f"nats://{NOWHERE}", tasks) for pair in pairs}
        for proxy in routes.values():
            await proxy.restore()
        try:
            yield routes
        finally:
            for proxy in routes.values():
                proxy.cut()
