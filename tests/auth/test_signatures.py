"""Signatures without a server: a correct signature is valid, and every other signature is rejected."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.auth.credentials import (
    SIGNED,
    BadKey,
    BadSignature,
    Credentials,
    Role,
    Signatures,
    encode_key,
    issue,
    load_credentials,
    new_seed,
    nkey_public_key,
    public_key,
    signing_key,
)
from rollbus.bus.auth.users import (
    PUBLISHER_COMMANDS,
    certify,
    credentials_path,
    ensure_roots,
    ensure_users,
    remove_user,
)
from rollbus.schemas.control import Certificate
from rollbus.schemas.errors import BusBroken, InvalidRequest

SUBJECT = "rb.v1.F.control.boss"
DATA = b'{"command":"pause","id":"1"}'
BOSS = ("F", Role.ADMIN, "boss")
CAROL = ("F", Role.PUBLISHER, "carol")
WORKER = ("F", Role.WORKER, "w0")
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
"""The example of NATS's documentation."""


def credentials(folder: Path, one: tuple[str, Role, str]) -> Credentials:
    """Return the credentials of a user."""
    return load_credentials(credentials_path(folder, *one))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create users of two fleets and return their folder."""
    ensure_users(tmp_path, [BOSS, CAROL, WORKER, ("G", Role.ADMIN, "boss")], {CAROL: ("m",)})
    return tmp_path


def test_a_signature_shows_the_user_and_the_allowed_changes(folder: Path) -> None:
    """A worker learns from a signature which user signed the message, and what that user may change."""
    reader = Signatures(credentials(folder, WORKER))
    boss = Signatures(credentials(folder, BOSS))
    signed = reader.check(SUBJECT, DATA, boss.headers(SUBJECT, DATA))
    carol = reader.check(SUBJECT, b"", Signatures(credentials(folder, CAROL)).headers(SUBJECT, b""))

    assert (signed.by.role, signed.by.name, signed.by.is_limited) == ("admin", "boss", False)
    assert abs(signed.age_s) < 3600
    assert (carol.by.models, carol.by.commands, carol.by.is_limited) == (("m",), PUBLISHER_COMMANDS, True)
    assert boss.own == signed.by


def test_a_worker_has_no_certificate_and_signs_nothing(folder: Path) -> None:
    """A worker's credentials contain the root keys that it trusts and no certificate, so a worker signs nothing."""
    worker = Signatures(credentials(folder, WORKER))

    assert worker.headers(SUBJECT, DATA) == {}
    assert worker.own is None
    assert worker.are_demanded


def test_without_users_nothing_is_signed_or_checked() -> None:
    """Without credentials or root keys, nothing is signed and nothing is verified."""
    old = Credentials(fleet="F", role=Role.ADMIN, name="a", seed=SEED)
    for signatures in (Signatures(None), Signatures(old)):
        assert signatures.headers(SUBJECT, DATA) == {}
        assert signatures.check(SUBJECT, DATA, None) is None
        assert not signatures.are_demanded


@pytest.mark.parametrize(
    ("subject", "data"), [("rb.v1.F.control.other", DATA), (SUBJECT, DATA + b" "), ("$KV.rollbus.F.m", DATA)]
)
def test_a_signature_is_valid_only_for_its_subject_and_content(subject: str, data: bytes, folder: Path) -> None:
    """A signature is invalid for other content and for the subject of another controller or of a state."""
    reader = Signatures(credentials(folder, WORKER))
    with pytest.raises(BadSignature, match="is not the one that admin boss signed"):
        reader.check(subject, data, Signatures(credentials(folder, BOSS)).headers(SUBJECT, DATA))


def test_a_signature_of_an_admin_of_another_fleet_is_invalid(folder: Path) -> None:
    """A signature of another fleet's admin is invalid."""
    reader = Signatures(credentials(folder, WORKER))
    other = Signatures(credentials(folder, ("G", Role.ADMIN, "boss")))
    with pytest.raises(BadSignature, match="no root key of the fleet signed"):
        reader.check(SUBJECT, DATA, other.headers(SUBJECT, DATA))


def test_certificates_of_a_copied_root_key_are_invalid_in_another_fleet(folder: Path) -> None:
    """Certificates name their fleet, so copying root.seed to another fleet does not make them valid there."""
    mine = credentials(folder, WORKER)
    boss = credentials(folder, ("G", Role.ADMIN, "boss"))
    reader = Signatures(msgspec.structs.replace(mine, roots=boss.roots))
    with pytest.raises(BadSignature, match="is for fleet G; this fleet is F"):
        reader.check(SUBJECT, DATA, Signatures(boss).headers(SUBJECT, DATA))


def test_a_certificate_that_a_worker_signs_itself_is_invalid(folder: Path) -> None:
    """A certificate that a worker signs itself is invalid.

    An admin's certificate is invalid with a signature of the worker's key.
    """
    worker, boss = credentials(folder, WORKER), credentials(folder, BOSS)
    reader = Signatures(worker)
    wanted = Certificate(fleet="F", role="admin", name="w0", key=signing_key(worker.seed))
    own = msgspec.structs.replace(worker, certificate=issue(b"k" * 32, wanted))
    with pytest.raises(BadSignature, match="no root key of the fleet signed"):
        reader.check(SUBJECT, DATA, Signatures(own).headers(SUBJECT, DATA))
    taken = msgspec.structs.replace(worker, certificate=boss.certificate)
    with pytest.raises(BadSignature, match="is not the one that admin boss signed"):
        reader.check(SUBJECT, DATA, Signatures(taken).headers(SUBJECT, DATA))


def test_a_signed_login_nonce_is_no_message_signature(folder: Path) -> None:
    """A server cannot obtain a message signature as a nonce, because a user signs nonces with another key."""
    boss = credentials(folder, BOSS)
    text = Signatures(boss).headers(SUBJECT, DATA)[SIGNED]
    certificate, at, _ = text.rsplit(".", 2)
    nonce = f"rollbus message 1\n{SUBJECT}\n{at}\n{DATA.decode()}"
    forged = boss.sign(nonce).decode().translate(str.maketrans("+/", "-_")).rstrip("=")
    with pytest.raises(BadSignature, match="is not the one that admin boss signed"):
        Signatures(credentials(folder, WORKER)).check(SUBJECT, DATA, {SIGNED: f"{certificate}.{at}.{forged}"})


@given(st.one_of(st.text(max_size=300), st.from_regex(r"[\w-]*\.[\w-]*\.[0-9]*\.[\w-]*", fullmatch=True)))
def test_any_other_header_is_refused(header: str) -> None:
    """Every other header raises `BadSignature`."""
    root = public_key(b"r" * 32)
    reader = Signatures(Credentials(fleet="F", role=Role.WORKER, name="w", seed=SEED, roots=(root,)))
    with pytest.raises(BadSignature):
        reader.check(SUBJECT, DATA, {SIGNED: header})


@pytest.mark.parametrize("at", ["", "-1", "1" * 16, "x", "²"])
def test_the_time_of_a_signature_consists_of_digits(at: str, folder: Path) -> None:
    """The time of a signature consists of digits, and a signature with another time is invalid."""
    certificate, _, signature = Signatures(credentials(folder, BOSS)).headers(SUBJECT, DATA)[SIGNED].rsplit(".", 2)
    with pytest.raises(BadSignature):
        Signatures(credentials(folder, WORKER)).check(SUBJECT, DATA, {SIGNED: f"{certificate}.{at}.{signature}"})


def without_signatures(path: Path) -> dict[str, Any]:
    """Turn a credentials file into that of a release without signatures, and return its former fields."""
    fields: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    old = {name: fields[name] for name in ("fleet", "role", "name", "seed")}
    path.write_bytes(msgspec.json.encode(old))
    return fields


def test_a_folder_of_an_earlier_release_gets_root_and_certificates(folder: Path) -> None:
    """A folder of an earlier release gets a root key and certificates and keeps its keys.

    Only the owner can read the files, and a second run changes nothing.
    """
    paths = [credentials_path(folder, *one) for one in (BOSS, CAROL, WORKER)]
    before = [without_signatures(path) for path in paths]
    assert load_credentials(paths[0]).roots == ()
    ensure_users(folder, [])

    assert [msgspec.json.decode(path.read_bytes()) for path in paths] == before
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 3
    assert (folder / "F" / "root.seed").stat().st_mode & 0o777 == 0o600
    contents = [path.read_bytes() for path in paths]
    ensure_users(folder, [])
    assert [path.read_bytes() for path in paths] == contents


def test_auth_certify_renews_a_moved_credentials_file(folder: Path, tmp_path: Path) -> None:
    """`auth certify` renews a moved credentials file if its key belongs to a user of the folder."""
    path = tmp_path / "moved.creds"
    credentials_path(folder, *BOSS).rename(path)
    before = without_signatures(path)
    assert certify(folder, path).name == "boss"
    assert msgspec.json.decode(path.read_bytes()) == before

    remove_user(folder, BOSS)
    with pytest.raises(BusBroken, match="is not a user in"):
        certify(folder, path)


def test_readers_trust_the_old_and_the_new_root_key_during_a_replacement(folder: Path) -> None:
    """If the root key is moved to root-old.seed, a run creates a new one and readers trust both.

    After root-old.seed is deleted, they trust only the new one.
    """
    old = Signatures(credentials(folder, BOSS))
    (folder / "F" / "root.seed").rename(folder / "F" / "root-old.seed")
    ensure_users(folder, [])
    new, reader = Signatures(credentials(folder, BOSS)), Signatures(credentials(folder, WORKER))
    for signer in (old, new):
        assert reader.check(SUBJECT, DATA, signer.headers(SUBJECT, DATA)) is not None

    (folder / "F" / "root-old.seed").unlink()
    ensure_users(folder, [])
    reader = Signatures(credentials(folder, WORKER))
    assert reader.check(SUBJECT, DATA, new.headers(SUBJECT, DATA)) is not None
    with pytest.raises(BadSignature, match="no root key of the fleet signed"):
        reader.check(SUBJECT, DATA, old.headers(SUBJECT, DATA))


def test_only_root_seed_contains_the_root_key(folder: Path) -> None:
    """Only root.seed contains the root key, and its representation does not show the key."""
    secret = (folder / "F" / "root.seed").read_text().strip()
    others = [path for path in folder.rglob("*") if path.is_file() and path.name != "root.seed"]

    assert not [path for path in others if secret in path.read_text()]
    assert secret not in repr(ensure_roots(folder / "F"))


def test_an_invalid_root_seed_is_an_error_and_not_overwritten(folder: Path) -> None:
    """An invalid root.seed is an error. The file is not overwritten, and nothing is certified."""
    (folder / "F" / "root.seed").write_text("short\n")
    with pytest.raises(BusBroken, match=r"root\.seed is not a root key"):
        ensure_users(folder, [])

    assert (folder / "F" / "root.seed").read_text() == "short\n"


def test_a_run_without_models_keeps_the_models_of_a_publisher(folder: Path) -> None:
    """A run without models keeps a publisher's models.

    A run with models replaces them in certificate and permissions.
    """
    [same] = ensure_users(folder, [CAROL])
    assert same.user.models == ("m",)
    ensure_users(folder, [CAROL], {CAROL: ("a/b", "c")})
    own = Signatures(credentials(folder, CAROL)).own

    assert own.models == ("a/b", "c")
    assert "$KV.rollbus.F.a=2Fb" in (folder / "users.conf").read_text()
    assert '$KV.rollbus.F.m"' not in (folder / "users.conf").read_text()


@pytest.mark.parametrize(("one", "models"), [(("F", Role.PUBLISHER, "d"), ()), (("F", Role.TRAINER, "d"), ("m",))])
def test_models_are_required_for_a_publisher_and_refused_for_other_roles(
    one: tuple[str, Role, str], models: tuple[str, ...], folder: Path
) -> None:
    """Models are required for a publisher and not allowed for other roles."""
    with pytest.raises(InvalidRequest, match="models for publishers, and for no others"):
        ensure_users(folder, [one], {one: models})


def test_a_damaged_credentials_file_is_refused_when_loaded(folder: Path) -> None:
    """A truncated or edited credentials file is rejected when it is loaded, not when the first command arrives."""
    path = credentials_path(folder, *WORKER)
    fields = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(fields | {"roots": [encode_key(b"short")]}))
    with pytest.raises(BusBroken, match="is not a credentials file"):
        load_credentials(path)


# The NATS keys that rollbus creates and uses have the format of NATS's own tools.


# From the documentation of nats-server.
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_a_seed_gives_the_public_key_that_nats_documents() -> None:
    """The public key of a documented seed is the documented key, so prefix, base32 and checksum are correct."""
    assert nkey_public_key(SEED) == PUBLIC


def test_each_new_seed_is_unique_and_has_the_format_of_nats() -> None:
    """Each new seed is unique, has the format of NATS and has a public key."""
    seeds = {new_seed() for _ in range(8)}

    assert len(seeds) == 8
    assert {seed[:2] for seed in seeds} == {"SU"}
    assert {len(seed) for seed in seeds} == {len(SEED)}
    assert {nkey_public_key(seed)[0] for seed in seeds} == {"U"}


def test_a_server_verifies_the_signature_of_its_nonce_with_the_public_key() -> None:
    """A server that knows only the public key can verify the signature of its nonce."""
    key, own = base64.b32decode(PUBLIC)[1:33], Credentials(fleet="F", role=Role.ADMIN, name="a", seed=SEED)

    Ed25519PublicKey.from_public_bytes(key).verify(base64.b64decode(own.sign("nonce")), b"nonce")


@pytest.mark.parametrize("seed", ["", "SU", PUBLIC, SEED[:-1] + "A", SEED.lower(), "SA" + SEED[2:], "SU1" + SEED[3:]])
def test_an_invalid_seed_is_refused_and_not_quoted(seed: str) -> None:
    """A seed of another kind, a seed with a typing error and a public key are rejected.

    The error does not quote them.
    """
    with pytest.raises(BadKey) as caught:
        nkey_public_key(seed)

    assert len(seed) < 3 or seed not in str(caught.value)
