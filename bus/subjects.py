"""Every subject in one place. docs/protocol.md is written from this table.

| subject below `rb.v1.<fleet>.` | from → to | payload |
|---|---|---|
| `req.<client>.<model>.<lane>` | client → the model's queue → one of its workers | msgpack `RequestMessage` |
| `direct.<client>.<worker>` | client → the worker of a session, or a prefill worker | msgpack `RequestMessage` |
| `frame.<client>.<worker>` | worker → client | msgpack `Frame` |
| `link.<client>.<worker>` | client → worker | msgpack `LinkMessage` |
| `plain.<client>.>` | worker → a program without a link | msgpack `Frame` |
| `presence.<worker>` | worker → clients, and other workers of the same id | JSON `WorkerPresence` |
| `client.<client>` | client → workers | JSON `ClientPresence` |
| `control.<controller>` | controller → workers | JSON command |
| `ack.<controller>.<worker>` | worker → controller | JSON `Ack` |
| `ping` | anyone → workers: announce yourselves now | empty |

NATS names no sender, so identity stands in the subject, where permissions can bind it. Model names are encoded
reversibly into one subject token; the other names are subject tokens already.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final, get_args

from ..schemas.checks import check_subject_token
from ..schemas.request import Lane

__all__ = [
    "BUCKET",
    "LANES",
    "PREFIX",
    "Subjects",
    "check_subject_token",
    "decode_token",
    "encode_token",
    "published_bucket",
    "upload_bucket",
]

PREFIX = "rb.v1"
BUCKET: Final = "rollbus"
"""Shared by all fleets of a server; each has keys of its own."""
LANES: Final[tuple[Lane, ...]] = get_args(Lane)
"""In the order in which workers empty them."""
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def encode_token(name: str) -> str:
    """Encode any name as one subject token: other bytes of its UTF-8 become `=XX`, upper-case hexadecimal.

    Raises:
        ValueError: the name is empty or not Unicode; no subject token stands for it.
    """
    if not name:
        raise ValueError("an empty name cannot stand in a subject")
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in name.encode())


def decode_token(token: str) -> str:
    """Undo `encode_token`.

    Raises:
        ValueError: `token` is no encoded name.
    """
    raw = re.sub(r"=([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), token).encode("latin-1")
    name = raw.decode()
    if encode_token(name) != token:
        raise ValueError(f"{token!r} is not an encoded name")
    return name


def upload_bucket(fleet: str) -> str:
    """Name the bucket of the object store for what admins upload."""
    return f"{BUCKET}-{fleet}"


def published_bucket(fleet: str, model: str) -> str:
    """Name the bucket for what publishers of `model` upload: a permission names a bucket, but no folder in it.

    A model's name may have characters that no bucket's has, so this has a hash of it.
    """
    return f"{upload_bucket(fleet)}-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one fleet.

    Raises:
        InvalidRequest: `fleet`, or a client or worker given to a method, cannot stand in a subject: a wildcard or a
            dot would reach others' subjects.
    """

    fleet: str

    def __post_init__(self) -> None:
        """Check the fleet's name."""
        check_subject_token("fleet", self.fleet)

    @property
    def _root(self) -> str:
        return f"{PREFIX}.{self.fleet}"

    def request(self, client: str, model: str, lane: Lane) -> str:
        """Where `client` publishes a request for `model`."""
        return f"{self._root}.req.{check_subject_token('client', client)}.{encode_token(model)}.{lane}"

    def requests_in(self, model: str, lane: Lane) -> str:
        """All requests for `model` in one lane, of any client."""
        return f"{self._root}.req.*.{encode_token(model)}.{lane}"

    def direct(self, client: str, worker: str) -> str:
        """Where `client` hands requests to the worker at which it places them."""
        return self._pair("direct", client, worker)

    def directs_to(self, worker: str) -> str:
        """What any client hands to `worker`."""
        return f"{self._root}.direct.*.{check_subject_token('worker', worker)}"

    def plain(self, client: str) -> str:
        """What every `reply_to` of `client` begins with."""
        return f"{self._root}.plain.{check_subject_token('client', client)}."

    def frame(self, client: str, worker: str) -> str:
        """Where `worker` publishes frames for `client`."""
        return self._pair("frame", client, worker)

    def frames_to(self, client: str) -> str:
        """All frames for `client`."""
        return f"{self._root}.frame.{check_subject_token('client', client)}.*"

    def link(self, client: str, worker: str) -> str:
        """Where `client` tells `worker` about its requests there."""
        return self._pair("link", client, worker)

    def links_to(self, worker: str) -> str:
        """What any client tells `worker`."""
        return f"{self._root}.link.*.{check_subject_token('worker', worker)}"

    def presence(self, worker: str) -> str:
        """Where `worker` announces itself."""
        return f"{self._root}.presence.{check_subject_token('worker', worker)}"

    def _pair(self, kind: str, client: str, worker: str) -> str:
        check_subject_token("client", client)
        check_subject_token("worker", worker)
        return f"{self._root}.{kind}.{client}.{worker}"

    @property
    def presences(self) -> str:
        """The presence of every worker."""
        return f"{self._root}.presence.*"

    def client(self, client: str) -> str:
        """Where `client` announces itself."""
        return f"{self._root}.client.{check_subject_token('client', client)}"

    @property
    def clients(self) -> str:
        """The presence of every client."""
        return f"{self._root}.client.*"

    def control(self, controller: str) -> str:
        """Where `controller` publishes commands."""
        return f"{self._root}.control.{check_subject_token('controller', controller)}"

    @property
    def controls(self) -> str:
        """The commands of every controller."""
        return f"{self._root}.control.*"

    def ack(self, controller: str, worker: str) -> str:
        """Where `worker` answers the commands of `controller`."""
        return self._pair("ack", check_subject_token("controller", controller), worker)

    def acks_to(self, controller: str) -> str:
        """What any worker answers `controller`."""
        return f"{self._root}.ack.{check_subject_token('controller', controller)}.*"

    @property
    def acks(self) -> str:
        """What any worker answers any controller."""
        return f"{self._root}.ack.*.*"

    @property
    def ping(self) -> str:
        """A message here makes every worker announce itself at once."""
        return f"{self._root}.ping"
