"""The subjects that each role may publish and subscribe to, and the accounts of a NATS server that follow from them.

NATS denies every subject that is not listed here. In subjects, a user may use only its own name: clients the name of
the client or controller, workers the name of the worker. If a subject also names a peer, any peer is allowed.

NATS checks the subject of a publish, but neither its reply subject nor subjects in the payload of a JetStream API call.
Only admins may make calls whose payload names a subject (`STREAM.CREATE`, `STREAM.UPDATE`, `CONSUMER.CREATE`).
`STREAM.INFO` of a queue lists the clients whose requests wait, but shows no request. Only admins and frontends may call
it, because they may end any request of the fleet anyway. For the same reason, these two roles may receive all command
acks. Other roles receive only the acks of their own commands.

JetStream answers on the reply subject without a permission check, but only in the account of the sender. Each fleet
therefore has three kinds of accounts:

    <fleet>                  JetStream and the admins
    <fleet>~workers          all workers; it has no JetStream
    <fleet>~<role>~<name>    one trainer, publisher, frontend or viewer; it has no JetStream

An account imports only what the permissions of its users allow. Otherwise an answer on an imported subject could
continue into the account that exports it. No fleet, role or name contains a `~`.

The accounts of HTTP services import each other's messages about waiting requests, so only another HTTP service can ask
for their abort.

Messages from workers reach clients by stream imports, which cost the server nothing. Messages to workers and to
JetStream use service imports (4 to 5 us of the server's CPU for a message).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from ..subjects import BUCKET, LANES, PREFIX, encode_token, published_bucket, session_bucket, upload_bucket
from .credentials import CLIENT_ROLES, Role, User

_NOBODY: Final[frozenset[Role]] = frozenset()
REQUESTERS: Final = frozenset({Role.TRAINER, Role.PUBLISHER, Role.FRONTEND})
"""Roles that may send requests."""
_COMMANDERS: Final = frozenset({Role.ADMIN, Role.FRONTEND})
_PUBLISHERS: Final = frozenset({Role.PUBLISHER})
OWN_READERS: Final = frozenset({Role.TRAINER, Role.PUBLISHER, Role.VIEWER})
"""Roles that read only their own requests, and counts of experts."""
_WORKERS: Final = frozenset({Role.WORKER})
_ADMINS: Final = frozenset({Role.ADMIN})
_FRONTENDS: Final = frozenset({Role.FRONTEND})
_READERS: Final = _WORKERS | _PUBLISHERS | _ADMINS
_EVERYBODY: Final = frozenset(Role)
_OWN_NAME: Final = {Role.WORKER: frozenset({"<worker>"})} | dict.fromkeys(
    CLIENT_ROLES, frozenset({"<client>", "<controller>"})
)
"""Placeholders for a user's own name."""
_PUBLISHED: Final = "<published>"
"""Placeholder for each model of a publisher."""
_UPLOADS: Final = "<uploads>"
"""Placeholder for the bucket of each of these models."""
_PLACEHOLDER: Final = re.compile(r"<\w+>")
INBOX: Final = "<inbox>."
"""Prefix of the subjects on which a user receives answers."""
_API: Final = "$JS.API"
_KV: Final = f"KV_{BUCKET}"
_OBJECTS: Final = f"OBJ_{upload_bucket('<fleet>')}"
_SESSIONS: Final = session_bucket("<fleet>")
_WILDCARD: Final = re.compile(r"<\w+>|[*>]")
_STREAMED: Final = (".CONSUMER.MSG.NEXT.", ".DIRECT.GET.")
"""Services of JetStream that answer with several messages."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The roles that may use one kind of subject."""

    subject: str
    """Subject as in docs/protocol.md: below `rb.v1.<fleet>.` in `SUBJECT_RULES`, complete in `JETSTREAM_RULES`."""
    publish: frozenset[Role] = _NOBODY
    subscribe: frozenset[Role] = _NOBODY
    observe: frozenset[Role] = _NOBODY
    """Roles that may subscribe to the subject with every name, also with the names of other users."""
    why: str = ""
    """Purpose, which errors name: a user may not `why`."""


SUBJECT_RULES: Final = (
    Rule("req.<client>.<model>.<lane>", publish=REQUESTERS, why="send requests"),  # workers pull them from the stream
    # Admins send no requests. Workers reject a request under this name, which no client may have.
    Rule("req.~probe.<model>.<lane>", publish=_ADMINS, why="probe queues"),
    Rule("direct.<client>.<worker>", publish=REQUESTERS, subscribe=_WORKERS, why="send requests"),
    Rule("frame.<client>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES, why="exchange results"),
    Rule("link.<client>.<worker>", publish=REQUESTERS, subscribe=_WORKERS, why="acknowledge results"),
    Rule("plain.<client>.>", publish=_WORKERS, subscribe=REQUESTERS, why="exchange results"),
    # Workers also: to detect a worker with their id, or with other content under their version.
    Rule("presence.<worker>", publish=_WORKERS, subscribe=_EVERYBODY, observe=_WORKERS, why="announce workers"),
    Rule("client.<client>", publish=CLIENT_ROLES, subscribe=_EVERYBODY, why="announce clients"),
    Rule("control.<controller>", publish=_COMMANDERS | _PUBLISHERS, subscribe=_WORKERS, why="send commands"),
    # Workers answer with the requests of the subject's client only. Admins and frontends read all by commands.
    Rule("read.<client>.<worker>", publish=OWN_READERS, subscribe=_WORKERS, why="read telemetry"),
    Rule(
        "ack.<controller>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES, observe=_COMMANDERS, why="exchange acks"
    ),
    Rule("service.<client>", publish=_FRONTENDS, observe=_FRONTENDS, why="find waiting requests at HTTP services"),
    Rule("ping.<client>", publish=CLIENT_ROLES, subscribe=_WORKERS, why="ping workers"),
    Rule("ping", publish=CLIENT_ROLES, subscribe=_WORKERS, why="ping workers"),
)
"""The subjects of rollbus, one for each row of the table in `rollbus.bus.subjects`."""


JETSTREAM_RULES: Final = (
    Rule(f"{_API}.INFO", publish=_EVERYBODY, why="read the storage limits"),
    Rule(f"{_API}.CONSUMER.INFO.*.*", publish=_EVERYBODY, why="count waiting requests; check that a queue exists"),
    Rule(f"{_API}.STREAM.INFO.*", publish=_COMMANDERS, why="read a queue's settings, and the clients that wait"),
    Rule(f"{_API}.STREAM.LIST", publish=_ADMINS, why="find streams, their leaders and replicas"),
    Rule(f"{_API}.STREAM.INFO.{_KV}", publish=_EVERYBODY - _COMMANDERS, why="list models with a desired state"),
    *(Rule(f"{_API}.CONSUMER.MSG.NEXT.*.{lane}", publish=_WORKERS, why="pull requests") for lane in LANES),
    *(Rule(f"$JS.ACK.*.{lane}.>", publish=_WORKERS, why="acknowledge requests") for lane in LANES),
    Rule(f"{_API}.STREAM.CREATE.*", publish=_ADMINS, why="create queues and buckets"),
    Rule(f"{_API}.STREAM.UPDATE.*", publish=_ADMINS, why="change a queue's limits"),
    Rule(f"{_API}.STREAM.DELETE.*", publish=_ADMINS, why="delete the queue of a forgotten model"),
    Rule(f"{_API}.CONSUMER.CREATE.*.*", publish=_ADMINS, why="create queues"),
    Rule(f"{_API}.STREAM.MSG.GET.{_KV}", publish=_EVERYBODY, why="read desired states"),
    Rule(f"{_API}.STREAM.PURGE.{_KV}", publish=_ADMINS, why="delete the desired state of a forgotten model"),
    Rule(
        f"$KV.{BUCKET}.<fleet>.*",
        publish=_COMMANDERS,
        subscribe=_WORKERS,
        why="record commands",
    ),
    Rule(f"$KV.{BUCKET}.<fleet>.{_PUBLISHED}", publish=_PUBLISHERS, why="record new weights of its models"),
    Rule(f"{_API}.STREAM.MSG.GET.{_OBJECTS}", publish=_WORKERS | _ADMINS, why="read descriptions of uploads"),
    Rule(f"{_API}.STREAM.INFO.{_OBJECTS}", publish=_WORKERS, why="list uploads"),
    Rule(f"{_API}.DIRECT.GET.{_OBJECTS}", publish=_WORKERS, why="fetch uploads"),
    Rule(f"{_API}.STREAM.PURGE.{_OBJECTS}", publish=_ADMINS, why="delete old uploads"),
    Rule(f"$O.{upload_bucket('<fleet>')}.>", publish=_ADMINS, why="upload weights and adapters"),
    Rule(f"{_API}.STREAM.MSG.GET.OBJ_{_UPLOADS}", publish=_READERS, why="read descriptions of published weights"),
    Rule(f"{_API}.STREAM.INFO.OBJ_{_UPLOADS}", publish=_READERS - _ADMINS, why="list published weights"),
    Rule(f"{_API}.DIRECT.GET.OBJ_{_UPLOADS}", publish=_WORKERS | _PUBLISHERS, why="fetch published weights"),
    Rule(f"{_API}.STREAM.PURGE.OBJ_{_UPLOADS}", publish=_PUBLISHERS | _ADMINS, why="delete old published weights"),
    Rule(f"$O.{_UPLOADS}.>", publish=_PUBLISHERS | _ADMINS, why="upload weights of its models"),
    Rule(f"{_API}.STREAM.MSG.GET.KV_{_SESSIONS}", publish=_FRONTENDS, why="read sessions"),
    Rule(f"{_API}.STREAM.PURGE.KV_{_SESSIONS}", publish=_FRONTENDS, why="delete old sessions"),
    Rule(f"$KV.{_SESSIONS}.>", publish=_FRONTENDS, why="store sessions"),
    Rule(f"{INBOX}>", subscribe=_EVERYBODY, why="receive answers"),
)
"""The subjects of NATS's own services that rollbus uses."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def as_config(self) -> dict[str, dict[str, list[str]]]:
        """Return the permissions in the format of a server's configuration.

        NATS denies everything else to a user with this list.
        """
        return {
            "publish": {"allow": list(self.publish)},
            "subscribe": {"allow": list(self.subscribe)},
        }


def permissions(user: User) -> Permissions:
    """Return the permissions of `user`."""
    return Permissions(
        publish=tuple(subject for rule in rules() if user.role in rule.publish for subject in subjects_of(rule, user)),
        subscribe=tuple(subject for rule in rules() for subject in subscribable_subjects(rule, user)),
    )


def rules() -> Iterator[Rule]:
    """Yield the rules of both tables with complete subjects."""
    for rule in SUBJECT_RULES:
        yield dataclasses.replace(rule, subject=f"{PREFIX}.<fleet>.{rule.subject}")
    yield from JETSTREAM_RULES


def subjects_of(rule: Rule, user: User) -> tuple[str, ...]:
    """Return the rule's subjects for one user: its own names, and `*` for every peer's name.

    The result is one subject, or one for each of the user's models if the rule depends on models.
    """
    names = {"<inbox>": user.inbox_prefix} | dict.fromkeys(_OWN_NAME[user.role], user.name)
    return _for_each_model(rule, user.fleet, user.models, names)


def subscribable_subjects(rule: Rule, user: User) -> tuple[str, ...]:
    """Return the rule's subjects that one user may subscribe to."""
    if user.role in rule.observe:
        return any_subjects(rule, user.fleet, user.models)
    return subjects_of(rule, user) if user.role in rule.subscribe else ()


def any_subjects(rule: Rule, fleet: str, models: Iterable[str]) -> tuple[str, ...]:
    """Return the rule's subjects for all users of a fleet, with `*` for every name.

    Args:
        models: models that have publishers.
    """
    return tuple(dict.fromkeys(_for_each_model(rule, fleet, models, {_PUBLISHED: "*"})))


def _for_each_model(rule: Rule, fleet: str, models: Iterable[str], names: dict[str, str]) -> tuple[str, ...]:
    if _PUBLISHED not in rule.subject and _UPLOADS not in rule.subject:
        models = ("",)
    found = []
    for model in models:
        own = {_PUBLISHED: encode_token(model), _UPLOADS: published_bucket(fleet, model)} if model else {}
        fixed = {"<fleet>": fleet} | own | names
        found.append(_PLACEHOLDER.sub(lambda match, fixed=fixed: fixed.get(match[0], "*"), rule.subject))  # type: ignore[misc]
    return tuple(found)


def describe_denial(user: User, action: str, subject: str) -> str:
    """Return why the server denied this, for example `may not send requests; roles that may: trainer`.

    Args:
        action: `publish` or `subscribe`.
    """
    named = (rule for rule in rules() if not rule.subject.startswith(INBOX))
    matching = [rule for rule in named if _as_pattern(rule.subject).fullmatch(subject)]
    # Of two rules, the one with fewer wildcards is meant.
    for rule in sorted(matching, key=lambda rule: -len(_WILDCARD.sub("", rule.subject))):
        roles = rule.publish if action == "publish" else rule.subscribe | rule.observe
        if roles and user.role in roles:
            return f"may not {rule.why} under this name or for this model"
        if roles:
            return f"may not {rule.why}; roles that may: {', '.join(role for role in Role if role in roles)}"
    return f"may not {action} {'to' if action == 'subscribe' else 'on'} {subject}"


def _as_pattern(subject: str) -> re.Pattern[str]:
    names = _WILDCARD.sub(lambda match: ">" if match[0] == ">" else "*", subject)
    return re.compile(re.escape(names).replace(r"\*", r"[^.]+").replace(">", ".+"))


def accounts(users: Iterable[User]) -> dict[str, object]:
    """Return the `accounts` section of a server's configuration. The server rejects all other users."""
    users = tuple(users)
    found: dict[str, dict[str, Any]] = {}
    published: dict[str, tuple[str, ...]] = {}
    for fleet in dict.fromkeys(user.fleet for user in users):
        models = dict.fromkeys(model for user in users if user.fleet == fleet for model in user.models)
        published[fleet] = tuple(models)
        found[fleet] = _hub_account(fleet, published[fleet])
        found[_workers(fleet)] = _workers_account(fleet, published[fleet])
    for one in users:
        # Admins and workers read the uploads of all publishers.
        reads_all = one.role in {Role.ADMIN, Role.WORKER}
        user = replace(one, models=published[one.fleet]) if reads_all else one
        name = _account_of(user)
        if name not in found:
            found[name] = {"imports": _client_imports(user), "users": []}
        found[name]["users"].append({"nkey": user.public_key, "permissions": permissions(user).as_config()})
    _connect_services(found, users)
    return dict(found)


def _connect_services(found: dict[str, dict[str, Any]], users: Iterable[User]) -> None:
    """Let the HTTP services of each fleet receive each other's messages."""
    for rule in rules():
        if rule.publish == rule.observe == _FRONTENDS:
            services = [user for user in users if user.role in rule.publish]
            exports = {_account_of(user): {"stream": subjects_of(rule, user)[0]} for user in services}
            fleets = {_account_of(user): user.fleet for user in services}
            for own, export in exports.items():
                others = [each for each in exports if each != own and fleets[each] == fleets[own]]
                found[own]["exports"] = [export]
                found[own]["imports"] += [_from(each, exports[each]) for each in others]


def _workers(fleet: str) -> str:
    return f"{fleet}~workers"


def _account_of(user: User) -> str:
    if user.role is Role.ADMIN:
        return user.fleet
    return _workers(user.fleet) if user.role is Role.WORKER else f"{user.fleet}~{user.role}~{user.name}"


def _is_of_workers(rule: Rule) -> bool:
    """Return True if the subject belongs to the workers' account.

    Subjects of requests and of JetStream belong to the hub.
    """
    return rule.subject.startswith(PREFIX) and ".req." not in rule.subject


def _tables() -> tuple[list[Rule], list[Rule], list[Rule]]:
    """Return three lists of rules: messages from workers, messages to workers, and JetStream."""
    shared = [rule for rule in rules() if not rule.subject.startswith(INBOX)]
    own = [rule for rule in shared if _is_of_workers(rule)]
    by_workers = [rule for rule in own if Role.WORKER in rule.publish]
    to_workers = [rule for rule in own if Role.WORKER in rule.subscribe and rule not in by_workers]
    return by_workers, to_workers, [rule for rule in shared if not _is_of_workers(rule)]


def _hub_account(fleet: str, models: tuple[str, ...]) -> dict[str, Any]:
    by_workers, to_workers, of_jetstream = _tables()
    exports: list[dict[str, Any]] = []
    for rule in of_jetstream:
        if rule.publish - {Role.ADMIN}:
            is_streamed = any(verb in rule.subject for verb in _STREAMED)
            for service in _all("service", [rule], fleet, models):
                export = service | ({"response_type": "stream"} if is_streamed else {})
                # Some roles use the service on all subjects, others only on their own: it is one service.
                if export not in exports:
                    exports.append(export)
        if rule.subscribe:
            exports += _all("stream", [rule], fleet, models)
    used = _all("stream", [rule for rule in by_workers if Role.ADMIN in rule.subscribe], fleet, models)
    used += _all("service", [rule for rule in to_workers if Role.ADMIN in rule.publish], fleet, models)
    imports = [_from(_workers(fleet), export) for export in used]
    return {"jetstream": "enabled", "exports": exports, "imports": imports, "users": []}


def _workers_account(fleet: str, models: tuple[str, ...]) -> dict[str, Any]:
    by_workers, to_workers, of_jetstream = _tables()
    exports = _all("stream", by_workers, fleet, models) + _all("service", to_workers, fleet, models)
    used = _all("service", [rule for rule in of_jetstream if Role.WORKER in rule.publish], fleet, models)
    used += _all("stream", [rule for rule in of_jetstream if Role.WORKER in rule.subscribe], fleet, models)
    imports = [_from(fleet, export) for export in used]
    return {"exports": exports, "imports": imports, "users": []}


def _client_imports(user: User) -> list[dict[str, Any]]:
    by_workers, to_workers, of_jetstream = _tables()
    imports = []
    for home, table in ((_workers(user.fleet), by_workers + to_workers), (user.fleet, of_jetstream)):
        for rule in table:
            # Import each subject once: two imports would deliver each message twice.
            if rule.subject.endswith(".ping"):
                # The ping of an earlier release does not name its sender, so the server adds the name.
                imports += [
                    _from(home, {"service": f"{subject}.{user.name}"}) | {"to": subject}
                    for subject in subjects_of(rule, user)
                ]
            elif user.role in rule.publish:
                imports += [_from(home, {"service": subject}) for subject in subjects_of(rule, user)]
            else:
                imports += [_from(home, {"stream": subject}) for subject in subscribable_subjects(rule, user)]
    return imports


def _all(kind: str, used: Iterable[Rule], fleet: str, models: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return exports of a kind, `stream` or `service`, for the subjects of these rules."""
    return [{kind: subject} for rule in used for subject in any_subjects(rule, fleet, models)]


def _from(account: str, export: dict[str, Any]) -> dict[str, Any]:
    [(kind, subject)] = export.items()
    return {kind: {"account": account, "subject": subject}}
