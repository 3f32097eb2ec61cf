"""Checks of the NATS server, the permissions of this user, and the fleet."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ....bus.auth.credentials import CLIENT_ROLES, Credentials, Role, User, load_credentials
from ....bus.auth.files import is_private
from ....bus.auth.permissions import permissions
from ....bus.auth.tls import Tls
from ....bus.client.presence_watcher import PresenceWatcher
from ....bus.control.store import DesiredStore
from ....bus.nats.connection import Connection, connected, subscribe
from ....bus.nats.jetstream import ApiError, Unanswered, ask
from ....bus.nats.permitted import check_permitted
from ....bus.nats.reachable import describe_reachable
from ....bus.nats.server import Server
from ....bus.nats.storage import free_storage
from ....bus.subjects import BUCKET, Subjects
from ....schemas.errors import BusBroken, PermissionDenied
from ..byte_counts import gib, size
from .door import enter
from .findings import Finding, Status, fail, ok, warn
from .published import examine_published
from .streams import NO_LEADER_ADVICE, examine_streams

__all__ = ["DoctorTarget", "examine_bus"]

GOOD_PAYLOAD_BYTES: Final = 1024**2
"""NATS's own default. Below it, routed experts are split into many small segments, and long prompts are rejected."""
QUEUE_BYTES: Final = 5 * 1024**3
"""Storage that the two streams of a model reserve."""
FAR_OFF_S: Final = 1.0
"""Difference of two clocks above which logs of two machines are hard to compare."""
PROBE: Final = "doctor"
"""Token of subjects without subscribers and without a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorTarget:
    """The server and fleet to check."""

    url: str
    creds: str | None
    """Path of the credentials file."""
    fleet: str | None
    """None for the fleet of the credentials, or `default` without credentials."""


async def examine_bus(target: DoctorTarget) -> AsyncIterator[Finding]:
    """Run all checks that need a server. If an early check fails, the later checks may be impossible."""
    credentials: Credentials | None = None
    if target.creds is not None:
        try:
            credentials = load_credentials(target.creds)
        except BusBroken as error:
            yield fail("credentials", str(error), "name a file from `rollbus auth init` that you can read")
            return
        yield _credentials(target.creds, credentials)
    server = Server(target.url, credentials, Tls.from_environment())
    fleet = target.fleet or ("default" if credentials is None else credentials.fleet)
    is_open = False
    for finding in await enter(server):
        yield finding
        is_open = is_open or finding.status is Status.OK
    if not is_open:
        return
    try:
        async with connected(server, name="rollbus doctor") as nats:
            async for finding in _server(nats):
                yield finding
            async for finding in _permissions(nats, fleet, credentials):
                yield finding
            if credentials is None or credentials.role is Role.ADMIN:
                async for finding in examine_streams(nats, fleet):
                    yield finding
            if credentials is None or credentials.role in CLIENT_ROLES:
                async for finding in _fleet(nats, fleet, PROBE if credentials is None else credentials.name):
                    yield finding
            for_models = await _published_models(nats, fleet, credentials)
            async for finding in examine_published(nats, fleet, for_models):
                yield finding
    except BusBroken as error:
        yield fail("server", str(error), "run this again: the server was reachable a moment ago")


async def _published_models(nats: Connection, fleet: str, credentials: Credentials | None) -> tuple[str, ...]:
    """Return the models whose published weights this user may read."""
    if credentials is None or credentials.role is Role.ADMIN:
        try:
            return await DesiredStore(nats, Subjects(fleet)).models()
        except BusBroken:  # the check of JetStream reports this
            return ()
    own = nats.signatures.own
    return () if own is None or credentials.role is not Role.PUBLISHER else own.models or ()


def _credentials(path: str, credentials: Credentials) -> Finding:
    found = f"{credentials.user}, from {path}"
    if not is_private(path):
        return warn("credentials", f"{found}; other users of this machine can read the file", f"chmod 600 {path}")
    if not credentials.roots:
        return warn(
            "credentials",
            f"{found}, without a root key: unsigned data is accepted",
            f"rollbus auth certify --dir DIR {path}, where DIR is the folder of `rollbus auth init`",
        )
    return ok("credentials", found)


async def _server(nats: Connection) -> AsyncIterator[Finding]:
    payload = nats.max_payload
    if payload < GOOD_PAYLOAD_BYTES:
        yield warn("max_payload", f"{payload} bytes", "max_payload: 8MB in the server's configuration")
    else:
        yield ok("max_payload", f"{payload / 1024**2:g} MiB")
    try:
        info = await ask(nats, "INFO")
    except PermissionDenied as error:
        yield fail("jetstream", str(error), "give the server the permissions that `rollbus auth` writes")
        return
    except Unanswered as error:
        found = f"{error}: {await describe_reachable(nats)}" if nats.is_in_cluster else str(error)
        yield fail("jetstream", found, "start the other servers: more than half of a cluster must run")
        return
    except (BusBroken, ApiError) as error:
        yield fail(
            "jetstream", str(error), "jetstream { store_dir: DIR } in the server's configuration, or nats-server -js"
        )
        return
    yield _storage(info, await free_storage(nats, QUEUE_BYTES))
    clock = await _clock(nats)
    if clock is not None:
        yield clock


def _storage(info: dict[str, Any], free: int | None) -> Finding:
    """Return how much is stored and how much storage is free.

    Args:
        free: bytes that the server can still reserve, at most `QUEUE_BYTES`; None if it does not tell this user.
    """
    used, limit = max(info["storage"], info["reserved_storage"]), info["limits"]["max_storage"]
    found = f"on, {size(info['storage'])} stored in {info['streams']} streams"
    if free is None and limit >= 0:
        free = max(0, limit - used)
    if free is None:
        return ok("jetstream", f"{found}; the server reports free storage to admins only, and not in a cluster")
    if free >= QUEUE_BYTES:
        return ok("jetstream", f"{found}, room for the queues of another model ({gib(QUEUE_BYTES)})")
    found = f"{found}, {size(free)} left to reserve"
    if info["reserved_storage"] >= QUEUE_BYTES:
        return ok("jetstream", f"{found}: enough for the existing queues, not for another model ({gib(QUEUE_BYTES)})")
    return warn(
        "jetstream",
        f"{found}; the queues of a model reserve {gib(QUEUE_BYTES)}",
        f"max_file_store of {QUEUE_BYTES // 1024**3}GB for each model in the server's jetstream block, on a disk with "
        "that space; a smaller queue rejects requests early",
    )


async def _clock(nats: Connection) -> Finding | None:
    """Compare this machine's clock with the server's, if the server returns its time. rollbus depends on neither."""
    before = time.time()
    try:
        timestamp = (await ask(nats, f"STREAM.INFO.KV_{BUCKET}")).get("ts")
    except (BusBroken, ApiError):
        return None
    if not isinstance(timestamp, str):
        return None
    # The server sends nine digits of the second's fraction. Python parses six.
    there = datetime.fromisoformat(timestamp[:26].rstrip("Z")).replace(tzinfo=UTC).timestamp()
    offset = there - (before + time.time()) / 2
    found = f"the server's clock is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'}"
    if abs(offset) > FAR_OFF_S:
        return warn("clock", found, "requests do not depend on it, but logs are hard to compare: use NTP")
    return ok("clock", found)


async def _permissions(nats: Connection, fleet: str, credentials: Credentials | None) -> AsyncIterator[Finding]:
    """Test the permissions that each role needs, with messages that have no receiver."""
    name = PROBE if credentials is None else credentials.name
    subjects = Subjects(fleet)
    deeds = {
        "send requests": subjects.direct(name, PROBE),
        "command": f"$KV.{BUCKET}.{fleet}.{PROBE}",
        "make queues": f"$JS.API.STREAM.UPDATE.{PROBE}",
        "serve": f"$JS.API.CONSUMER.MSG.NEXT.{PROBE}.normal",
    }
    may = [what for what, subject in deeds.items() if await _may_publish(nats, subject)]
    found = f"may {', '.join(may)}" if may else "may only read"
    if credentials is None:
        yield warn(
            "permissions",
            f"no credentials: any program that reaches this server {found}",
            "fine on one machine; otherwise `rollbus auth init`, or `rollbus up --secure`",
        )
        return
    expected = [what for what, subject in deeds.items() if _is_allowed(credentials.user, subject)]
    if may == expected:
        yield ok("permissions", f"{credentials.user} {found}")
    else:
        yield fail(
            "permissions",
            f"{credentials.user} {found}; its role is to {', '.join(expected) or 'read'}",
            "run `rollbus auth init` again, then reload the server's configuration (SIGHUP)",
        )
    if credentials.role in CLIENT_ROLES:
        yield await _reads(nats, subjects, credentials)


async def _may_publish(nats: Connection, subject: str) -> bool:
    try:
        async with nats.denials.expected(subject):
            # No stream fulfils this condition, so nothing is stored.
            await nats.publish(subject, b"", headers={"Nats-Expected-Stream": PROBE})
            await nats.confirm(timeout_s=2.0)
    except PermissionDenied:
        return False
    return True


def _is_allowed(user: User, subject: str) -> bool:
    return any(_covers(pattern, subject) for pattern in permissions(user).publish)


def _covers(pattern: str, subject: str) -> bool:
    expected, given = pattern.split("."), subject.split(".")
    if expected[-1] == ">":
        expected, given = expected[:-1], given[: len(expected) - 1] if len(given) >= len(expected) else []
    return len(expected) == len(given) and all(a in ("*", b) for a, b in zip(expected, given, strict=True))


async def _reads(nats: Connection, subjects: Subjects, credentials: Credentials) -> Finding:
    async def ignore(_message: object) -> None:
        return

    await subscribe(nats, subjects.frames_to(credentials.name), ignore)
    await subscribe(nats, subjects.presences, ignore)
    try:
        await check_permitted(nats)
    except PermissionDenied as error:
        return fail("subscriptions", str(error), "run `rollbus auth init` again, then reload the server")
    return ok("subscriptions", "receives presence of the workers and its own frames")


async def _fleet(nats: Connection, fleet: str, client: str) -> AsyncIterator[Finding]:
    """Check the workers of the fleet without publishing a client's presence.

    Presence would end the requests of a live client with the same name.
    """
    subjects = Subjects(fleet)
    watch = PresenceWatcher(nats, subjects, lambda _gone: None, lambda: None)
    await subscribe(nats, subjects.presences, watch.receive)
    workers, queues, problems = await watch.workers_and_queues()
    if not workers:
        yield warn(
            "fleet", f"no live workers in {fleet!r}", "start workers: `rollbus worker --model DIR`, or `rollbus up`"
        )
        return
    counts: dict[str, int] = {}
    for worker in workers:
        counts[worker.state] = counts.get(worker.state, 0) + 1
    yield ok("fleet", f"{len(workers)} workers: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    for worker in workers:
        if worker.last_error:
            yield warn(f"worker {worker.worker}", worker.last_error, "see docs/operate/troubleshoot.md")
    for model, problem in sorted(problems.items()):
        yield fail(f"queue of {model}", problem, NO_LEADER_ADVICE)
    for model, problem in sorted((await watch.check_queues(client)).items()):
        if model not in problems:
            found, _, advice = problem.rpartition("; ")
            yield fail(f"queue of {model}", found, advice)
    for model in sorted({worker.model for worker in workers} - {depth.model for depth in queues} - problems.keys()):
        yield warn(f"queue of {model}", "does not exist", f"an admin can create it: rollbus make-queue {model}")
