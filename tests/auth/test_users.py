"""The folder of users: `rollbus auth` creates it, a real nats-server reads it, and no key is ever overwritten."""

import json
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rollbus.bus.subjects
from rollbus import bus
from rollbus.bus.auth.credentials import Credentials, Role, Tls, User, load_credentials
from rollbus.bus.auth.permissions import SUBJECT_RULES, permissions
from rollbus.bus.auth.users import credentials_path, ensure_users, remove_user
from rollbus.bus.nats.connection import open_connection
from rollbus.bus.nats.embedded import find_binary
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.bus.subjects import published_bucket
from rollbus.schemas.errors import BusBroken, InvalidRequest
from tests.auth.permissions_doc import DOC, with_table
from tests.auth.support import run_here
from tests.cli.support import run_rollbus
from tests.support.nats_server import require_binary
from tests.support.tls_server import certificate

ALICE = ("F", Role.TRAINER, "alice")


def mode(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_the_files_with_secrets(tmp_path: Path) -> None:
    """Files have mode 0600 and folders 0700, and the server's files contain only public keys."""
    [entry] = ensure_users(tmp_path / "auth", [ALICE])
    seed = load_credentials(entry.path).seed

    assert [mode(entry.path), mode(entry.path.parent), mode(tmp_path / "auth")] == [0o600, 0o700, 0o700]
    for name in ("users.json", "users.conf"):
        text = (tmp_path / "auth" / name).read_text()
        assert entry.user.public_key in text
        assert seed not in text


def test_a_second_run_adds_and_changes_no_key(tmp_path: Path) -> None:
    """A second run adds users and changes no key, even if a user's secret was moved away."""
    [alice] = ensure_users(tmp_path, [ALICE])
    secret = alice.path.read_bytes()
    alice.path.unlink()
    again, worker = ensure_users(tmp_path, [ALICE, ("F", Role.WORKER, "w0")])

    assert (again.user, again.is_new, again.path.exists()) == (alice.user, False, False)
    assert worker.is_new
    assert [user["name"] for user in json.loads((tmp_path / "users.json").read_text())["users"]] == ["alice", "w0"]
    assert secret


def test_a_key_of_an_interrupted_run_is_kept_and_listed(tmp_path: Path) -> None:
    """If an interrupted run wrote a key and did not list it, the next run does not overwrite the key and lists it."""
    [alice] = ensure_users(tmp_path, [ALICE])
    secret = alice.path.read_bytes()
    (tmp_path / "users.json").unlink()
    [again] = ensure_users(tmp_path, [ALICE])

    assert (again.user, again.is_new, again.path.read_bytes()) == (alice.user, True, secret)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"fleet": "F", "role": "trainer", "name": "alice", "seed": "SUX"}'])
def test_an_invalid_credentials_file_is_an_error_and_not_overwritten(text: str, tmp_path: Path) -> None:
    """An invalid file at the path of a user's credentials is an error.

    It is neither used nor overwritten, and the error does not quote it.
    """
    path = credentials_path(tmp_path, *ALICE)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BusBroken, match="is not a credentials file") as caught:
        ensure_users(tmp_path, [ALICE])

    assert path.read_text() == text
    assert "SUX" not in str(caught.value)


def test_two_clients_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two clients of a fleet cannot share a name, because a trainer could then read the frontend's results.

    A worker may have a client's name.
    """
    ensure_users(tmp_path, [("F", Role.FRONTEND, "x"), ("F", Role.WORKER, "x"), ("G", Role.TRAINER, "x")])
    with pytest.raises(InvalidRequest, match="a name of its own"):
        ensure_users(tmp_path, [("F", Role.TRAINER, "x")])

    assert not credentials_path(tmp_path, "F", Role.TRAINER, "x").exists()


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "../x", "a b", "x" * 65])
def test_a_name_with_a_dot_or_a_wildcard_is_refused(name: str, tmp_path: Path) -> None:
    """A name with a dot or a wildcard is rejected, because it could match subjects of others."""
    with pytest.raises((InvalidRequest, BusBroken)):
        ensure_users(tmp_path, [("F", Role.TRAINER, name)])

    assert not list(tmp_path.glob("F/*"))


def test_a_removed_user_gets_a_new_key_when_added_again(tmp_path: Path) -> None:
    """A removed user disappears from the server's configuration, and gets a new key if it is added again."""
    [before] = ensure_users(tmp_path, [ALICE])
    assert remove_user(tmp_path, ALICE)
    assert not remove_user(tmp_path, ALICE)
    [after] = ensure_users(tmp_path, [ALICE])

    assert before.user.public_key != after.user.public_key
    assert before.user.public_key not in (tmp_path / "users.conf").read_text()


def test_credentials_show_no_secret() -> None:
    """Neither `repr` nor `str` of credentials, of their user or of a server shows the seed."""
    credentials = Credentials(
        fleet="F", role=Role.ADMIN, name="a", seed="SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
    )

    assert "SUAC" not in f"{credentials} {credentials!r} {Server('nats://h', credentials)} {credentials.user}"


@contextmanager
def nats_server(config: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run nats-server with a configuration file, wait until it is ready, and yield the process and its port."""
    with subprocess.Popen([find_binary(), "-c", config], stderr=subprocess.PIPE, text=True) as process:
        try:
            if process.stderr is None:
                raise RuntimeError("no stderr")
            log = ""
            for line in process.stderr:
                log += line
                if "Server is ready" in line:
                    break
            listening = re.search(r"Listening for client connections on .*:(\d+)", log)
            assert listening is not None, log
            yield process, int(listening[1])
        finally:
            process.terminate()


def reload(process: subprocess.Popen[str]) -> None:
    """Let the server reload its configuration, and wait until it has."""
    process.send_signal(signal.SIGHUP)
    for line in process.stderr or ():
        if "Reloaded" in line:
            return


def init(folder: Path, *options: str) -> dict[str, dict[str, str]]:
    """Run `rollbus auth init` and return the users by name."""
    done = run_here("auth", "init", "--dir", str(folder), "--listen", "127.0.0.1:-1", "--json", *options)
    assert (done.code, done.stderr) == (0, "")
    return {user["name"]: user for user in json.loads(done.stdout)["users"]}


@pytest.mark.slow
async def test_a_server_accepts_the_users_of_auth_init(tmp_path: Path) -> None:
    """A nats-server with the files of `auth init` accepts its users.

    After a reload, it also accepts users that were added.
    """
    require_binary()
    users = init(tmp_path, "--trainer", "alice")
    with nats_server(tmp_path / "nats-server.conf") as (process, port):
        url = f"nats://127.0.0.1:{port}"
        async with bus.connect(url, credentials=users["alice"]["creds"]) as rb:
            assert (await rb.fleet.state()).workers == ()
        added = init(tmp_path, "--trainer", "bob")
        removed = run_here("auth", "remove", "--dir", str(tmp_path), "--trainer", "alice")
        reload(process)
        async with bus.connect(url, credentials=added["bob"]["creds"]) as rb:
            assert (await rb.fleet.state()).workers == ()

    assert {name for name, user in users.items() if user["new"]} == {"admin", "alice", "frontend", "viewer"}
    assert {name for name, user in added.items() if user["new"]} == {"bob"}
    assert removed.code == 0
    assert not (tmp_path / "default" / "trainer-alice.creds").exists()


@pytest.mark.slow
async def test_the_configuration_can_have_tls(tmp_path: Path) -> None:
    """With a certificate, the server speaks only TLS, and clients verify the server with the file of `--tls-ca`."""
    require_binary()
    cert, key = certificate(tmp_path)
    users = init(tmp_path / "auth", "--server-cert", str(cert), "--server-key", str(key))
    creds = users["viewer"]["creds"]
    with nats_server(tmp_path / "auth" / "nats-server.conf") as (_, port):
        url = f"tls://127.0.0.1:{port}"
        nats = await open_connection(Server(url, load_credentials(creds), Tls(ca=str(cert))), name="test")
        info = await ask(nats, "INFO")
        await nats.shut()
        with pytest.raises(BusBroken, match="certificate verify failed"):
            await open_connection(Server(url, load_credentials(creds)), name="test", timeout_s=1)
        seen = await run_rollbus(url, "default", "status", "--creds", creds, "--tls-ca", str(cert))

    assert info["streams"] == 0
    assert (seen.code, f"has no workers at {url}; start some" in seen.stderr) == (5, True)


TLS_OPTIONS = ("--server-cert", "c.pem", "--server-key", "k.pem")


@pytest.mark.parametrize(
    ("first", "second", "option", "line"),
    [
        ((), TLS_OPTIONS, "--server-cert c.pem", 'tls {{ cert_file: "{0}/c.pem", key_file: "{0}/k.pem" }}'),
        (TLS_OPTIONS, ("--server-cert", "d.pem", "--server-key", "k.pem"), "--server-cert d.pem", "d.pem"),
        (TLS_OPTIONS, (*TLS_OPTIONS, "--client-ca", "a.pem"), "--client-ca a.pem", '"{0}/a.pem", verify: true }}'),
        ((), ("--listen", "0.0.0.0:4222"), "--listen 0.0.0.0:4222", 'listen: "0.0.0.0:4222"'),
        (("--listen", "0.0.0.0:4222"), ("--listen", "127.0.0.1:4222"), "--listen 127.0.0.1:4222", "listen:"),
    ],
)
def test_settings_that_an_existing_configuration_lacks_are_an_error(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], option: str, line: str
) -> None:
    """`auth init` never changes a configuration. An option that it lacks fails, names the line and changes nothing."""
    folder = tmp_path / "auth"
    written, repeated, without = (run_here("auth", "init", "--dir", str(folder), *each) for each in (first, first, ()))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    failed = run_here("auth", "init", "--dir", str(folder), "--trainer", "new", *second)

    assert [done.code for done in (written, repeated, without)] == [0, 0, 0]
    assert failed.code == 1
    assert option in failed.stderr
    assert line.format(Path.cwd()) in failed.stderr
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_settings_that_the_operator_wrote_are_recognised(tmp_path: Path) -> None:
    """`auth init` accepts options that an edited configuration has in another form, but not in a comment."""
    folder = tmp_path / "auth"
    init(folder)
    server = folder / "nats-server.conf"
    server.write_text("# listen: 0.0.0.0:1\nlisten = 0.0.0.0:2\ntls {\n  cert_file: 'c.pem'\n  key_file c.key\n}\n")
    options = ("--listen", "0.0.0.0:2", "--server-cert", "c.pem", "--server-key", "c.key")
    done, failed = (
        run_here("auth", "init", "--dir", str(folder), *each) for each in (options, ("--listen=0.0.0.0:1",))
    )

    assert (done.code, done.stderr, failed.code) == (0, "", 1)


def test_the_error_for_a_missing_tls_file_names_the_file() -> None:
    """The error for a missing TLS file names the file."""
    with pytest.raises(BusBroken, match=r"/nonexistent\.pem is not possible"):
        Tls(ca="/nonexistent.pem").context()

    assert Tls().context() is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--server-cert", "x"), "TLS requires --server-cert and --server-key"),
        (("--client-ca", "x"), "TLS requires --server-cert and --server-key"),
        (("--trainer", "a.b"), "name is 'a.b'"),
        (("--trainer", "admin"), "a name of its own"),
    ],
)
def test_invalid_options_of_auth_init_are_a_usage_error(options: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    """Invalid options of `rollbus auth init` are a usage error, and no file is written."""
    done = run_here("auth", "init", "--dir", str(tmp_path / "d"), *options)

    assert done.code == 2
    assert problem in done.stderr
    assert not list((tmp_path / "d").glob("*/*"))


# The table of permissions: every subject has a rule, and no user may use another user's name.


OF_BUCKETS = r"\.(KV_rollbus(-sessions-F)?|OBJ_rollbus-F(-[0-9a-f]{16})?)$"
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

    A publisher may purge its own bucket, and a frontend the bucket of sessions.
    """
    changes = [
        subject
        for subject in permissions(user(role, "me")).publish
        if re.search(r"\.(CREATE|UPDATE|DELETE|PURGE|RESTORE|SNAPSHOT|MSG\.DELETE|LEADER|PEER)\b", subject)
        and "CONSUMER" not in subject
    ]

    if role is Role.PUBLISHER:
        assert changes == [f"$JS.API.STREAM.PURGE.OBJ_{published_bucket('F', 'm')}"]
    elif role is Role.FRONTEND:
        assert changes == ["$JS.API.STREAM.PURGE.KV_rollbus-sessions-F"]
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
