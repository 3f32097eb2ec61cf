"""The NATS keys that rollbus creates and uses have the format of NATS's own tools."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollbus.bus.auth.credentials import BadKey, new_seed, nkey_public_key, sign

# From the documentation of nats-server.
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
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
    key = base64.b32decode(PUBLIC)[1:33]

    Ed25519PublicKey.from_public_bytes(key).verify(base64.b64decode(sign(SEED, "nonce")), b"nonce")


@pytest.mark.parametrize("seed", ["", "SU", PUBLIC, SEED[:-1] + "A", SEED.lower(), "SA" + SEED[2:], "SU1" + SEED[3:]])
def test_an_invalid_seed_is_refused_and_not_quoted(seed: str) -> None:
    """A seed of another kind, a seed with a typing error and a public key are rejected.

    The error does not quote them.
    """
    with pytest.raises(BadKey) as caught:
        nkey_public_key(seed)

    assert len(seed) < 3 or seed not in str(caught.value)
