"""Checks of the NATS server, of the permissions of this user, and of the fleet, and the findings of all checks.

Only admins can check streams: leaders, current replicas and limits for each client.
"""

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from ....bus.auth.credentials import CLIENT_ROLES, Credentials, Role, Tls, load_credentials
from ....bus.auth.permissions import permissions
from ....bus.auth.users import is_private
from ....bus.client.presence import PresenceWatcher
from ....bus.control.store import DesiredStore
from ....bus.nats.connection import Connection, check_permitted, connected, subscribe
from ....bus.nats.failures import describe_reachable
from ....bus.nats.jetstream import DEFAULT_REPLICAS, ApiError, StreamInfo, Unanswered, ask, free_storage, list_streams
from ....bus.nats.server import Server
from ....bus.objects.layout import stream_of
from ....bus.protocol.weights.chain import needed_for_chain
from ....bus.publish.chain_store import ChainKey, read_chain
from ....bus.subjects import BUCKET, Subjects, session_bucket, upload_bucket
from ....schemas.errors import BusBroken, ControlError, PermissionDenied
from ..console import gib, print_json, size
from ..exits import ExitCode
from ..tables import print_table
from .machine import Finding, Status, enter, examine_machine, fail, ok, warn, warn_if


async def examine_published(nats: Connection, fleet: str, models: Iterable[str]) -> AsyncIterator[Finding]:
    """Check the bucket of each model with published weights."""
    for model in sorted(models):
        check = f"published weights of {model}"
        try:
            record = await read_chain(nats, fleet, model)
            if record is None or not record.links:
                continue
            state = await ChainKey(nats, fleet, model).bucket_state()
        except (BusBroken, ControlError) as error:
            yield warn(check, str(error), "run this again with the credentials of an admin or of its publisher")
            continue
        needed = needed_for_chain(record.links)
        found = (
            f"version {record.links[-1].version}, {size(state.used)} used of {size(state.limit)}; two anchors and the "
            f"deltas between them need {size(needed)}"
        )
        advice = f"rollbus make-queue {model} --upload-bytes {needed}; until then all versions are deltas, "
        yield warn_if(needed > state.limit, check, found, f"{advice}and a later publication fails")


NO_LEADER_ADVICE: Final = "start the servers with its replicas; requests wait until more than half of the replicas run"
PUBLISHED: Final = re.compile("-[0-9a-f]{16}$")
"""Hash of the model at the end of a bucket of published weights."""


async def examine_streams(nats: Connection, fleet: str) -> AsyncIterator[Finding]:
    """Check each stream of the fleet."""
    try:
        streams, missing = await list_streams(nats)
    except Unanswered:  # the check of JetStream reports this
        return
    except (BusBroken, ApiError) as error:
        advice = "use an admin's credentials, or run `rollbus auth init` again"
        yield fail("streams", f"cannot be listed: {error}", advice)
        return
    own = [stream for stream in streams if is_of_fleet(stream.name, fleet)]
    for name in missing:
        if is_of_fleet(name, fleet):
            found = f"has no leader: {await describe_reachable(nats)}"
            yield fail(describe_stream(name, {}), found, NO_LEADER_ADVICE)
    for stream in own:
        for finding in _stream(stream):
            yield finding
    few = [stream for stream in own if stream.replicas < DEFAULT_REPLICAS]
    if nats.is_in_cluster and few and len(nats.servers) >= DEFAULT_REPLICAS:
        names = ", ".join(f"{describe_stream(one.name, one.config)}: {one.replicas}" for one in few)
        found = f"fewer than {DEFAULT_REPLICAS} in a cluster of {len(nats.servers)} servers ({names})"
        advice = "nats stream edit NAME --replicas 3, for each of them; until then, the loss of one server can lose it"
        yield warn("replicas", found, advice)
    if nats.is_in_cluster and own:
        leaders = Counter(stream.leader for stream in own if stream.leader)
        shown = ", ".join(f"{leader} leads {count}" for leader, count in sorted(leaders.items()))
        yield ok("streams", f"{len(own)} have a leader: {shown}")


def is_of_fleet(stream: str, fleet: str) -> bool:
    """Return True if rollbus created the stream of this name for the fleet, or for all fleets."""
    uploads = stream_of(upload_bucket(fleet))
    own = {uploads, f"KV_{BUCKET}", f"KV_{session_bucket(fleet)}"}
    return stream in own or stream.startswith(f"rb~{fleet}~") or PUBLISHED.sub("", stream) == uploads


def describe_stream(name: str, config: dict[str, Any]) -> str:
    """Return the content of a stream for which `is_of_fleet` is true.

    Args:
        config: configuration of the stream. Empty: unknown; a queue is then described by the name of its stream.
    """
    model = (config.get("metadata") or {}).get("model", name)
    if name == f"KV_{BUCKET}":
        return "desired states"
    if name.startswith("KV_"):
        return "sessions"
    if name.startswith("OBJ_"):
        return f"published weights in {name.removeprefix('OBJ_')}" if PUBLISHED.search(name) else "objects"
    return f"queue of {model}" + (" (resumed requests)" if name.endswith("~resume") else "")


def _stream(stream: StreamInfo) -> Iterator[Finding]:
    what = describe_stream(stream.name, stream.config)
    if stream.behind:
        found = f"{stream.replicas - len(stream.behind)} of {stream.replicas} replicas are current"
        advice = "wait until they are current before you stop another server; start the servers that do not run"
        yield warn(what, f"{found}; behind: {', '.join(stream.behind)}", advice)
    has_share = stream.config.get("max_msgs_per_subject", -1) > 0 and stream.config.get("discard_new_per_subject")
    if stream.name.startswith("rb~") and not has_share:
        model = (stream.config.get("metadata") or {}).get("model", "MODEL")
        found = "has no limit for each client: a client that floods it delays all others"
        yield warn(what, found, f"rollbus make-queue {model} --max-per-client 1024")


GOOD_PAYLOAD_BYTES: Final = 1024**2
"""NATS's own default. Below it, routed experts are split into many small segments, and long prompts are rejected."""
QUEUE_BYTES: Final = 5 * 1024**3
"""Storage that the two streams of a model reserve."""
FAR_OFF_S: Final = 1.0
"""Difference of two clocks above which logs of two machines are hard to compare."""
PROBE: Final = "doctor"
"""Token of subjects without subscribers and without a stream."""


async def examine_bus(url: str, creds: str | None, fleet: str | None) -> AsyncIterator[Finding]:
    """Run all checks that need a server. If an early check fails, the later checks may be impossible.

    Args:
        creds: path of the credentials file; None: no credentials.
        fleet: None for the fleet of the credentials, or `default` without credentials.
    """
    credentials: Credentials | None = None
    if creds is not None:
        try:
            credentials = load_credentials(creds)
        except BusBroken as error:
            yield fail("credentials", str(error), "name a file from `rollbus auth init` that you can read")
            return
        yield _credentials(creds, credentials)
    server = Server(url, credentials, Tls.from_environment())
    fleet = fleet or ("default" if credentials is None else credentials.fleet)
    is_open = False
    for finding in await enter(server):
        yield finding
        is_open = is_open or finding.status is Status.OK
    if not is_open:
        return
    try:
        async with connected(server, name="rollbus doctor") as nats:
            checks = [_server(nats), _permissions(nats, fleet, credentials)]
            if credentials is None or credentials.role is Role.ADMIN:
                checks.append(examine_streams(nats, fleet))
            if credentials is None or credentials.role in CLIENT_ROLES:
                checks.append(_fleet(nats, fleet, PROBE if credentials is None else credentials.name))
            checks.append(examine_published(nats, fleet, await _list_published(nats, fleet, credentials)))
            for check in checks:
                async for finding in check:
                    yield finding
    except BusBroken as error:
        yield fail("server", str(error), "run this again: the server was reachable a moment ago")


async def _list_published(nats: Connection, fleet: str, credentials: Credentials | None) -> tuple[str, ...]:
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
        advice = f"rollbus auth certify --dir DIR {path}, where DIR is the folder of `rollbus auth init`"
        return warn("credentials", f"{found}, without a root key: unsigned data is accepted", advice)
    return ok("credentials", found)


async def _server(nats: Connection) -> AsyncIterator[Finding]:
    payload, advice = nats.max_payload, "max_payload: 8MB in the server's configuration"
    yield warn_if(payload < GOOD_PAYLOAD_BYTES, "max_payload", f"{payload / 1024**2:g} MiB", advice)
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
        advice = "jetstream { store_dir: DIR } in the server's configuration, or nats-server -js"
        yield fail("jetstream", str(error), advice)
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
    advice = f"max_file_store of {QUEUE_BYTES // 1024**3}GB for each model in the server's jetstream block, on a disk "
    advice += "with that space; a smaller queue rejects requests early"
    return warn("jetstream", f"{found}; the queues of a model reserve {gib(QUEUE_BYTES)}", advice)


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
    advice = "requests do not depend on it, but logs are hard to compare: use NTP"
    return warn_if(abs(offset) > FAR_OFF_S, "clock", found, advice)


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
        advice = "fine on one machine; otherwise `rollbus auth init`, or `rollbus up --secure`"
        yield warn("permissions", f"no credentials: any program that reaches this server {found}", advice)
        return
    allowed = permissions(credentials.user).publish
    expected = [what for what, subject in deeds.items() if any(_covers(pattern, subject) for pattern in allowed)]
    if may == expected:
        yield ok("permissions", f"{credentials.user} {found}")
    else:
        advice = "run `rollbus auth init` again, then reload the server's configuration (SIGHUP)"
        role = ", ".join(expected) or "read"
        yield fail("permissions", f"{credentials.user} {found}; its role is to {role}", advice)
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


def _covers(pattern: str, subject: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(expression, subject) is not None


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
    workers = await watch.ping_workers()
    queues, problems = await watch.queues()
    if not workers:
        advice = "start workers: `rollbus worker --model DIR`, or `rollbus up`"
        yield warn("fleet", f"no live workers in {fleet!r}", advice)
        return
    counts = Counter(str(worker.state) for worker in workers)
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


async def run(args: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    creds = os.environ.get("ROLLBUS_CREDS") or None
    findings = [*examine_machine(), *[each async for each in examine_bus(args.nats, creds, args.fleet)]]
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    show_findings(args, findings, is_well=is_well)
    return ExitCode.OK if is_well else ExitCode.FAILED


def show_findings(args: argparse.Namespace, findings: list[Finding], *, is_well: bool) -> None:
    """Print the findings, the worst first."""
    if args.json:
        print_json({"ok": is_well, "findings": [asdict(finding) for finding in findings]})
        return
    rows: list[tuple[str, str, str]] = []
    for finding in sorted(findings, key=lambda finding: list(Status).index(finding.status), reverse=True):
        rows.append((finding.status, finding.check, finding.found))
        if finding.advice:
            rows.append(("", "", f"-> {finding.advice}"))
    print_table(("state", "check", "found"), rows)
