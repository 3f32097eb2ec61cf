"""Who may publish and subscribe where: every subject that the software uses, by role. What is not listed is denied.

A user may use its own name in subjects and no other's: a client's or controller's name is its own for clients, a
worker's for workers; where a subject also names somebody else, that is anybody. Each fleet is a NATS account, so that
streams, buckets and subjects of other fleets do not exist for its users.

What JetStream sends by itself is bound by no permission, and neither are the contents of a configuration that its API
takes: whoever may make or change a stream can copy every subject into it. So that is for administrators alone.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bus.control.store import BUCKET
from bus.credentials import CLIENT_ROLES, Role, User
from bus.queue.streams import LANES
from bus.subjects import PREFIX

__all__ = ["JETSTREAM_RULES", "SUBJECT_RULES", "Permissions", "Rule", "permissions"]

_NOBODY: Final[frozenset[Role]] = frozenset()
_REQUESTERS: Final = frozenset({Role.TRAINER, Role.FRONTEND})
_COMMANDERS: Final = frozenset({Role.ADMIN, Role.FRONTEND})
_WORKERS: Final = frozenset({Role.WORKER})
_ADMINS: Final = frozenset({Role.ADMIN})
_EVERYBODY: Final = frozenset(Role)
_OWN_NAME: Final = {Role.WORKER: frozenset({"<worker>"})} | dict.fromkeys(
    CLIENT_ROLES, frozenset({"<client>", "<controller>"})
)
"""What stands for a user's own name."""
_PLACEHOLDER: Final = re.compile(r"<\w+>")


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use one kind of subject."""

    subject: str
    """As docs/protocol.md writes it: below `rb.v1.<fleet>.` in `SUBJECT_RULES`, whole in `JETSTREAM_RULES`."""
    publish: frozenset[Role] = _NOBODY
    subscribe: frozenset[Role] = _NOBODY
    why: str = ""
    """What for, where the subject does not say it."""


SUBJECT_RULES: Final = (
    Rule("req.<client>.<model>.<lane>", publish=_REQUESTERS),  # workers get them from the stream
    Rule("direct.<client>.<worker>", publish=_REQUESTERS, subscribe=_WORKERS),
    Rule("frame.<client>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES),
    Rule("link.<client>.<worker>", publish=_REQUESTERS, subscribe=_WORKERS),
    Rule("plain.<client>.>", publish=_WORKERS, subscribe=_REQUESTERS),
    Rule("presence.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES),
    Rule("client.<client>", publish=CLIENT_ROLES, subscribe=_EVERYBODY),
    Rule("control.<controller>", publish=_COMMANDERS, subscribe=_WORKERS),
    Rule("ack.<controller>.<worker>", publish=_WORKERS, subscribe=CLIENT_ROLES),
    Rule("ping", publish=CLIENT_ROLES, subscribe=_WORKERS),
)
"""The software's own subjects, one for each row of the table in `bus.subjects`."""

_API: Final = "$JS.API"
_KV: Final = f"KV_{BUCKET}"
_OBJECTS: Final = f"OBJ_{BUCKET}-<fleet>"

JETSTREAM_RULES: Final = (
    Rule(f"{_API}.INFO", publish=_EVERYBODY, why="what the server has room for"),
    Rule(f"{_API}.CONSUMER.INFO.*.*", publish=_EVERYBODY, why="how much waits in a queue, and whether it is there"),
    Rule(f"{_API}.STREAM.INFO.*", publish=_EVERYBODY, why="how a queue is set up, and how far it has come"),
    *(Rule(f"{_API}.CONSUMER.MSG.NEXT.*.{lane}", publish=_WORKERS, why="take requests") for lane in LANES),
    *(Rule(f"$JS.ACK.*.{lane}.>", publish=_WORKERS, why="acknowledge requests") for lane in LANES),
    Rule(f"{_API}.STREAM.CREATE.*", publish=_ADMINS, why="make queues and buckets"),
    Rule(f"{_API}.STREAM.UPDATE.*", publish=_ADMINS, why="change a queue's bounds"),
    Rule(f"{_API}.CONSUMER.CREATE.*.*", publish=_ADMINS, why="make queues"),
    Rule(f"{_API}.STREAM.MSG.GET.{_KV}", publish=_EVERYBODY, why="read desired states"),
    Rule(f"$KV.{BUCKET}.<fleet>.*", publish=_COMMANDERS, subscribe=_WORKERS, why="record commands, and hear of them"),
    Rule(f"{_API}.STREAM.MSG.GET.{_OBJECTS}", publish=_WORKERS | _ADMINS, why="read what describes them"),
    Rule(f"{_API}.CONSUMER.CREATE.{_OBJECTS}", publish=_WORKERS, why="fetch them"),
    Rule(f"{_API}.CONSUMER.MSG.NEXT.{_OBJECTS}.*", publish=_WORKERS, why="the same"),
    Rule(f"{_API}.CONSUMER.DELETE.{_OBJECTS}.*", publish=_WORKERS, why="the same"),
    Rule(f"{_API}.STREAM.PURGE.{_OBJECTS}", publish=_ADMINS, why="delete old uploads"),
    Rule(f"$O.{BUCKET}-<fleet>.>", publish=_ADMINS, why="upload weights and adapters"),
    Rule("<inbox>.>", subscribe=_EVERYBODY, why="answers to oneself"),
)
"""The subjects of NATS's own services, as far as the software uses them."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Where one user may publish and subscribe."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def as_config(self) -> dict[str, dict[str, list[str]]]:
        """The same in the words of a server's configuration. NATS denies everything else to a user with such a list."""
        return {
            "publish": {"allow": list(self.publish)},
            "subscribe": {"allow": list(self.subscribe)},
        }


def permissions(user: User) -> Permissions:
    """What `user` may do."""
    return Permissions(
        publish=tuple(_subject(rule, user) for rule in _rules() if user.role in rule.publish),
        subscribe=tuple(_subject(rule, user) for rule in _rules() if user.role in rule.subscribe),
    )


def _rules() -> Iterator[Rule]:
    for rule in SUBJECT_RULES:
        yield Rule(f"{PREFIX}.<fleet>.{rule.subject}", rule.publish, rule.subscribe)
    yield from JETSTREAM_RULES


def _subject(rule: Rule, user: User) -> str:
    fixed = {"<fleet>": user.fleet, "<inbox>": user.inbox_prefix}
    own = dict.fromkeys(_OWN_NAME[user.role], user.name)
    return _PLACEHOLDER.sub(lambda match: (fixed | own).get(match[0], "*"), rule.subject)
