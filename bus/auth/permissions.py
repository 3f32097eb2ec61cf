"""The subjects that each role may publish and subscribe to. NATS denies every subject that is not listed here.

A user may use its own name in subjects and no other's: for clients that is the client's or controller's name, for
workers the worker's. Where a subject also names a peer, every peer is allowed.

NATS checks no permission on the reply subject of a publish, nor inside of the payload of a JetStream API call. The
accounts (`accounts.py`) confine replies. Calls whose payload names a subject (`STREAM.CREATE`, `STREAM.UPDATE`,
`CONSUMER.CREATE`) are for admins alone. `STREAM.INFO` of a queue lists whose requests wait, but shows no request. Only
admins and frontends have it: they may end any request of the fleet anyway. For the same reason these two may hear all
acks; others hear the acks to their own commands.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ..subjects import BUCKET, LANES, PREFIX, encode_token, published_bucket
from .credentials import CLIENT_ROLES, Role, User

__all__ = [
    "INBOX",
    "JETSTREAM_RULES",
    "SUBJECT_RULES",
    "Permissions",
    "Rule",
    "any_subjects",
    "heard_subjects",
    "permissions",
    "rules",
    "subjects_of",
]

_NOBODY: Final[frozenset[Role]] = frozenset()
_REQUESTERS: Final = frozenset({Role.TRAINER, Role.PUBLISHER, Role.FRONTEND})
_COMMANDERS: Final = frozenset({Role.ADMIN, Role.FRONTEND})
_PUBLISHERS: Final = frozenset({Role.PUBLISHER})
_WORKERS: Final = frozenset({Role.WORKER})
_ADMINS: Final = frozenset({Role.ADMIN})
_READERS: Final = _WORKERS | _PUBLISHERS | _ADMINS
_EVERYBODY: Final = frozenset(Role)
_OWN_NAME: Final = {Role.WORKER: frozenset({"<worker>"})} | dict.fromkeys(
    CLIENT_ROLES, frozenset({"<client>", "<controller>"})
)
"""What stands for a user's own name."""
_PUBLISHED: Final = "<published>"
"""Stands for each model of a publisher."""
_UPLOADS: Final = "<uploads>"
"""Stands for the bucket of each of them."""
_PLACEHOLDER: Final = re.compile(r"<\w+>")
INBOX: Final = "<inbox>."
"""Begins the subjects on which a user receives answers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The roles that may use one kind of subject."""

    subject: str
    """As docs/protocol.md writes it: below `rb.v1.<fleet>.` in `SUBJECT_RULES`, whole in `JETSTREAM_RULES`."""
    publish: frozenset[Role] = _NOBODY
    subscribe: frozenset[Role] = _NOBODY
    observe: frozenset[Role] = _NOBODY
    """May subscribe to it whatever names stand there, also those of others."""
    why: str = ""
    """What for, where the subject does not say it."""


SUBJECT_RULES: Final = (
    Rule("req.<client>.<model>.<lane>", publish=_REQUESTERS),  # workers get them from the stream
    Rule("direct.<client>.<worker>", publish=_REQUESTERS, subscribe=_WORKERS),
    Rule("frame.<client>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES),
    Rule("link.<client>.<worker>", publish=_REQUESTERS, subscribe=_WORKERS),
    Rule("plain.<client>.>", publish=_WORKERS, subscribe=_REQUESTERS),
    Rule("presence.<worker>", publish=_WORKERS, subscribe=_EVERYBODY),  # a worker its own: is there another of its id?
    Rule("client.<client>", publish=CLIENT_ROLES, subscribe=_EVERYBODY),
    Rule("control.<controller>", publish=_COMMANDERS | _PUBLISHERS, subscribe=_WORKERS),
    Rule("ack.<controller>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES, observe=_COMMANDERS),
    Rule("ping", publish=CLIENT_ROLES, subscribe=_WORKERS),
)
"""The software's own subjects, one for each row of the table in `rollbus.bus.subjects`."""

_API: Final = "$JS.API"
_KV: Final = f"KV_{BUCKET}"
_OBJECTS: Final = f"OBJ_{BUCKET}-<fleet>"

JETSTREAM_RULES: Final = (
    Rule(f"{_API}.INFO", publish=_EVERYBODY, why="what the server has room for"),
    Rule(f"{_API}.CONSUMER.INFO.*.*", publish=_EVERYBODY, why="how much waits in a queue, and whether it is there"),
    Rule(f"{_API}.STREAM.INFO.*", publish=_COMMANDERS, why="how a queue is set up, and whose requests wait"),
    Rule(f"{_API}.STREAM.LIST", publish=_ADMINS, why="find streams, their leaders and replicas"),
    Rule(f"{_API}.STREAM.INFO.{_KV}", publish=_EVERYBODY - _COMMANDERS, why="which models have a desired state"),
    *(Rule(f"{_API}.CONSUMER.MSG.NEXT.*.{lane}", publish=_WORKERS, why="take requests") for lane in LANES),
    *(Rule(f"$JS.ACK.*.{lane}.>", publish=_WORKERS, why="acknowledge requests") for lane in LANES),
    Rule(f"{_API}.STREAM.CREATE.*", publish=_ADMINS, why="make queues and buckets"),
    Rule(f"{_API}.STREAM.UPDATE.*", publish=_ADMINS, why="change a queue's bounds"),
    Rule(f"{_API}.CONSUMER.CREATE.*.*", publish=_ADMINS, why="make queues"),
    Rule(f"{_API}.STREAM.MSG.GET.{_KV}", publish=_EVERYBODY, why="read desired states"),
    Rule(f"$KV.{BUCKET}.<fleet>.*", publish=_COMMANDERS, subscribe=_WORKERS, why="record commands, and hear of them"),
    Rule(f"$KV.{BUCKET}.<fleet>.{_PUBLISHED}", publish=_PUBLISHERS, why="record new weights of its models"),
    Rule(f"{_API}.STREAM.MSG.GET.{_OBJECTS}", publish=_WORKERS | _ADMINS, why="read what describes them"),
    Rule(f"{_API}.STREAM.INFO.{_OBJECTS}", publish=_WORKERS, why="list them"),
    Rule(f"{_API}.DIRECT.GET.{_OBJECTS}", publish=_WORKERS, why="fetch them"),
    Rule(f"{_API}.STREAM.PURGE.{_OBJECTS}", publish=_ADMINS, why="delete old uploads"),
    Rule(f"$O.{BUCKET}-<fleet>.>", publish=_ADMINS, why="upload weights and adapters"),
    Rule(f"{_API}.STREAM.MSG.GET.OBJ_{_UPLOADS}", publish=_READERS, why="read what describes uploads of publishers"),
    Rule(f"{_API}.STREAM.INFO.OBJ_{_UPLOADS}", publish=_READERS - _ADMINS, why="list them"),
    Rule(f"{_API}.DIRECT.GET.OBJ_{_UPLOADS}", publish=_WORKERS | _PUBLISHERS, why="fetch them"),
    Rule(f"{_API}.STREAM.PURGE.OBJ_{_UPLOADS}", publish=_PUBLISHERS | _ADMINS, why="delete old ones"),
    Rule(f"$O.{_UPLOADS}.>", publish=_PUBLISHERS | _ADMINS, why="upload weights of its models"),
    Rule(f"{INBOX}>", subscribe=_EVERYBODY, why="answers to oneself"),
)
"""The subjects of NATS's own services, as far as the software uses them."""


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
        subscribe=tuple(subject for rule in rules() for subject in heard_subjects(rule, user)),
    )


def rules() -> Iterator[Rule]:
    """Yield the rules of both tables with complete subjects."""
    for rule in SUBJECT_RULES:
        yield Rule(f"{PREFIX}.<fleet>.{rule.subject}", rule.publish, rule.subscribe, rule.observe)
    yield from JETSTREAM_RULES


def subjects_of(rule: Rule, user: User) -> tuple[str, ...]:
    """Return the rule's subjects for one user: its own names, and `*` for every peer's name.

    The result is one subject, or one for each of the user's models if the rule depends on models.
    """
    names = {"<inbox>": user.inbox_prefix} | dict.fromkeys(_OWN_NAME[user.role], user.name)
    return _for_each_model(rule, user.fleet, user.models, names)


def heard_subjects(rule: Rule, user: User) -> tuple[str, ...]:
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
