"""The accounts of a NATS server, generated from the table of permissions.

NATS checks the subject of a publish but never its reply subject. JetStream answers on the reply subject without a
permission check, but only in the account of the sender. Each fleet therefore has three kinds of accounts:

    <fleet>                  JetStream and the admins
    <fleet>~workers          all workers; it has no JetStream
    <fleet>~<role>~<name>    one trainer, publisher, frontend or viewer; it has no JetStream

An account imports only what the permissions of its users allow. Otherwise an answer on an imported subject could
continue into the account that exports it. No fleet, role or name contains a `~`.

Messages from workers reach clients by stream imports, which cost the server nothing. Messages to workers and to
JetStream use service imports (4 to 5 us of the server's CPU for a message).
"""

from collections.abc import Iterable
from typing import Any, Final

from msgspec.structs import replace

from ..subjects import PREFIX
from .credentials import CLIENT_ROLES, Role, User
from .permissions import INBOX, Rule, any_subjects, heard_subjects, permissions, rules, subjects_of

__all__ = ["account_of", "accounts"]

_STREAMED: Final = (".CONSUMER.MSG.NEXT.", ".DIRECT.GET.")
"""Services of JetStream that answer with several messages."""

_CLIENTS: Final = CLIENT_ROLES - {Role.ADMIN}


def accounts(users: Iterable[User]) -> dict[str, object]:
    """Return the `accounts` section of a server's configuration. The server rejects all other users."""
    users = tuple(users)
    found: dict[str, dict[str, Any]] = {}
    published: dict[str, tuple[str, ...]] = {}
    for fleet in dict.fromkeys(user.fleet for user in users):
        models = dict.fromkeys(model for user in users if user.fleet == fleet for model in user.models)
        published[fleet] = tuple(models)
        found[_hub(fleet)] = _hub_account(fleet, published[fleet])
        found[_workers(fleet)] = _workers_account(fleet, published[fleet])
    for one in users:
        # Admins and workers read the uploads of all publishers.
        reads_all = one.role in {Role.ADMIN, Role.WORKER}
        user = replace(one, models=published[one.fleet]) if reads_all else one
        name = account_of(user)
        if name not in found:
            found[name] = {"imports": _client_imports(user), "users": []}
        found[name]["users"].append({"nkey": user.public_key, "permissions": permissions(user).as_config()})
    return dict(found)


def _hub(fleet: str) -> str:
    return fleet


def _workers(fleet: str) -> str:
    return f"{fleet}~workers"


def account_of(user: User) -> str:
    """Return the name of a user's account."""
    if user.role is Role.ADMIN:
        return _hub(user.fleet)
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
            for service in _services(rule, fleet, models):
                export = service | ({"response_type": "stream"} if is_streamed else {})
                # Some roles use the service on all subjects, others only on their own: it is one service.
                if export not in exports:
                    exports.append(export)
        if rule.subscribe:
            exports += _streams(rule, fleet, models)
    workers = _workers(fleet)
    imports = [
        _from(workers, stream)
        for rule in by_workers
        if Role.ADMIN in rule.subscribe
        for stream in _streams(rule, fleet, models)
    ]
    imports += [
        _from(workers, service)
        for rule in to_workers
        if Role.ADMIN in rule.publish
        for service in _services(rule, fleet, models)
    ]
    return {"jetstream": "enabled", "exports": exports, "imports": imports, "users": []}


def _workers_account(fleet: str, models: tuple[str, ...]) -> dict[str, Any]:
    by_workers, to_workers, of_jetstream = _tables()
    exports = [stream for rule in by_workers for stream in _streams(rule, fleet, models)]
    exports += [service for rule in to_workers for service in _services(rule, fleet, models)]
    imports = []
    for rule in of_jetstream:
        if Role.WORKER in rule.publish:
            imports += [_from(_hub(fleet), service) for service in _services(rule, fleet, models)]
        if Role.WORKER in rule.subscribe:
            imports += [_from(_hub(fleet), stream) for stream in _streams(rule, fleet, models)]
    return {"exports": exports, "imports": imports, "users": []}


def _client_imports(user: User) -> list[dict[str, Any]]:
    by_workers, to_workers, of_jetstream = _tables()
    imports = []
    for home, table in ((_workers(user.fleet), by_workers + to_workers), (_hub(user.fleet), of_jetstream)):
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
                imports += [_from(home, {"stream": subject}) for subject in heard_subjects(rule, user)]
    return imports


def _services(rule: Rule, fleet: str, models: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"service": subject} for subject in any_subjects(rule, fleet, models)]


def _streams(rule: Rule, fleet: str, models: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"stream": subject} for subject in any_subjects(rule, fleet, models)]


def _from(account: str, export: dict[str, Any]) -> dict[str, Any]:
    [(kind, subject)] = export.items()
    return {kind: {"account": account, "subject": subject}}
