"""The permissions as a table: every subject has a decision, and nobody may use another's name."""

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
    """A user whose key does not matter."""
    return User(fleet="F", role=role, name=name, public_key="U", models=("m",) if role is Role.PUBLISHER else ())


def test_every_subject_of_the_software_has_a_decision() -> None:
    """A subject that is new in bus/subjects.py says here who may use it."""
    assert [rule.subject for rule in SUBJECT_RULES] == ROW.findall(rollbus.bus.subjects.__doc__ or "")


@pytest.mark.parametrize("role", list(Role))
def test_what_two_users_of_a_role_share_names_neither(role: Role) -> None:
    """Wherever a user's own name stands, the other's stands for the other."""
    one, other = permissions(user(role, "one")), permissions(user(role, "other"))

    for mine, others in ((one.publish, other.publish), (one.subscribe, other.subscribe)):
        assert [re.sub(r"\bone\b", "other", subject) for subject in mine] == list(others)
        assert not [subject for subject in mine if re.search(r"\bother\b", subject)]


@pytest.mark.parametrize("role", CLIENTS)
def test_a_client_names_itself_wherever_a_client_stands(role: Role) -> None:
    """No wildcard stands for a client, but in what clients hear of workers, and in what those that command watch."""
    own = permissions(user(role, "me"))
    kinds = r"rb\.v1\.F\.(req|direct|frame|link|plain|client|control|ack)\."

    watched = {"rb.v1.F.ack.*.*"} if role in {Role.FRONTEND, Role.ADMIN} else set()
    assert watched <= set(own.subscribe)
    for subject in (*own.publish, *sorted(set(own.subscribe) - watched)):
        if re.match(kinds, subject):
            assert subject.split(".")[4] == "me", subject


@pytest.mark.parametrize("role", list(Role))
def test_nobody_but_an_admin_may_change_a_stream(role: Role) -> None:
    """Its configuration could copy every subject into it: not even workers may. A publisher empties its own bucket."""
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
def test_nobody_may_read_a_queue_but_by_taking_from_it(role: Role) -> None:
    """Neither by number nor directly, nor with a consumer of one's own: requests are for the worker that gets them."""
    reads = [
        subject
        for subject in permissions(user(role, "me")).publish
        if re.search(r"MSG\.GET|DIRECT\.GET", subject) and not re.search(OF_BUCKETS, subject)
    ]

    assert reads == []


def test_the_documented_table_is_the_code() -> None:
    """docs/operate/secure.md has the rules of the code: `python -m tests.auth.permissions_doc` writes its tables."""
    text = DOC.read_text()

    assert text == with_table(text)
