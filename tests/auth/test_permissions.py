"""The table of permissions: every subject has a rule, and no user may use another user's name."""

import re

import pytest

import rollbus.bus.subjects
from rollbus.bus.auth.credentials import Role, User
from rollbus.bus.auth.permissions import SUBJECT_RULES, permissions
from rollbus.bus.subjects import published_bucket
from tests.auth.permissions_doc import DOC, with_table

OF_BUCKETS = r"\.(KV_rollbus|OBJ_rollbus-F(-[0-9a-f]{16})?)$"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
CLIENTS = [role for role in Role if role is not Role.WORKER]


def user(role: Role, name: str) -> User:
    """Return a user with an arbitrary key."""
    return User(fleet="F", role=role, name=name, public_key="U", models=("m",) if role is Role.PUBLISHER else ())


def test_every_subject_has_a_rule() -> None:
    """Each subject of bus/subjects.py has a rule."""
    assert [rule.subject for rule in SUBJECT_RULES] == ROW.findall(rollbus.bus.subjects.__doc__ or "")


@pytest.mark.parametrize("role", list(Role))
def test_permissions_of_two_users_of_a_role_differ_only_in_the_name(role: Role) -> None:
    """The permissions of two users of a role differ only in the user's name."""
    one, other = permissions(user(role, "one")), permissions(user(role, "other"))

    for mine, others in ((one.publish, other.publish), (one.subscribe, other.subscribe)):
        assert [re.sub(r"\bone\b", "other", subject) for subject in mine] == list(others)
        assert not [subject for subject in mine if re.search(r"\bother\b", subject)]


@pytest.mark.parametrize("role", CLIENTS)
def test_only_observers_of_acks_have_a_wildcard_in_place_of_a_client(role: Role) -> None:
    """A client's permissions have a wildcard in place of a client only where an admin or a frontend observes acks.

    Presence of workers names no client. An admin's probes name none either.
    """
    own = permissions(user(role, "me"))
    kinds = r"rb\.v1\.F\.(req|direct|frame|link|plain|client|control|ack)\."

    watched = {"rb.v1.F.ack.*.*"} if role in {Role.FRONTEND, Role.ADMIN} else set()
    assert watched <= set(own.subscribe)
    probed = {"rb.v1.F.req.~probe.*.*"} if role is Role.ADMIN else set()
    assert probed <= set(own.publish)
    for subject in sorted((set(own.publish) - probed) | (set(own.subscribe) - watched)):
        if re.match(kinds, subject):
            assert subject.split(".")[4] == "me", subject


@pytest.mark.parametrize("role", list(Role))
def test_only_an_admin_may_change_a_stream(role: Role) -> None:
    """Only an admin may change a stream, because a stream's configuration could copy every subject into it.

    A publisher may purge its own bucket.
    """
    changes = [
        subject
        for subject in permissions(user(role, "me")).publish
        if re.search(r"\.(CREATE|UPDATE|DELETE|PURGE|RESTORE|SNAPSHOT|MSG\.DELETE|LEADER|PEER)\b", subject)
        and "CONSUMER" not in subject
    ]

    if role is Role.PUBLISHER:
        assert changes == [f"$JS.API.STREAM.PURGE.OBJ_{published_bucket('F', 'm')}"]
    else:
        assert bool(changes) == (role is Role.ADMIN)


@pytest.mark.parametrize("role", list(Role))
def test_no_role_may_read_a_queue_by_sequence_or_with_its_own_consumer(role: Role) -> None:
    """No role may read a queue by sequence number, directly or with a consumer of its own.

    Only the worker that pulls a request receives it.
    """
    reads = [
        subject
        for subject in permissions(user(role, "me")).publish
        if re.search(r"MSG\.GET|DIRECT\.GET", subject) and not re.search(OF_BUCKETS, subject)
    ]

    assert reads == []


def test_the_documented_tables_equal_the_code() -> None:
    """The tables in docs/operate/secure.md equal the code. `python -m tests.auth.permissions_doc` writes them."""
    text = DOC.read_text()

    assert text == with_table(text)
