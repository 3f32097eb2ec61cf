"""Every subject in one place. docs/protocol.md is generated from this table.

| subject below `rb.v1.<fleet>.` | from → to | payload |
|---|---|---|
| `req.<client>.<model>.<lane>` | client → the model's queue → one of its workers | msgpack `RequestMessage` |
| `req.~probe.<model>.<lane>` | admin → the model's queue, whose workers remove it | zeros |
| `direct.<client>.<worker>` | client → the worker of its placement, or a prefill worker | msgpack `RequestMessage` |
| `frame.<client>.<worker>` | worker → client | msgpack `Frame` |
| `link.<client>.<worker>` | client → worker | msgpack `LinkMessage` |
| `plain.<client>.>` | worker → a program without a link | msgpack `Frame` |
| `presence.<worker>` | worker → clients, and other workers with the same id | JSON `WorkerPresence` |
| `client.<client>` | client → workers | JSON `ClientPresence` |
| `control.<controller>` | controller → workers | JSON command |
| `read.<client>.<worker>` | client → worker: a read of its own requests, or of expert counts | JSON command |
| `ack.<controller>.<worker>` | worker → controller | JSON `Ack` |
| `service.<client>` | HTTP service → the other HTTP services | JSON `ServiceMessage` |
| `ping.<client>` | client → workers: request for immediate presence | empty |
| `ping` | the same from a client that does not name itself | empty |

A NATS message does not identify its sender. So the subject has the sender's name, which NATS permissions can enforce.
A model name is encoded reversibly into one subject token. The other names are subject tokens already.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final, get_args

from ..schemas.checks import check_subject_token
from ..schemas.request import Lane

PREFIX = "rb.v1"
ALL_PRESENCES: Final = f"{PREFIX}.*.presence.*"
"""The subjects of the presence of the workers of all fleets, which only a server without users lets a client read."""
BUCKET: Final = "rollbus"
"""The bucket that all fleets of a server share. Each fleet has its own keys."""
CLIENT_CONNECTION: Final = "rollbus client "
WORKER_CONNECTION: Final = "rollbus worker "
"""Names of connections, before the name of the client or the id of the worker."""
LANES: Final[tuple[Lane, ...]] = get_args(Lane)
"""The lanes of the queue."""
_PLAIN_NAME: Final = re.compile("[A-Za-z0-9_-]+")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def encode_token(name: str) -> str:
    """Encode any name as one subject token. Each other byte of its UTF-8 becomes `=XX`, in upper-case hexadecimal.

    Raises:
        ValueError: the name is empty or not Unicode, so it has no subject token.
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    if not name:
        raise ValueError("the name is empty; a subject token has at least one character")
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in name.encode())


def decode_token(token: str) -> str:
    """Decode a subject token that `encode_token` returned.

    Raises:
        ValueError: `token` is not an encoded name.
    """
    raw = re.sub(r"=([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), token).encode("latin-1")
    name = raw.decode()
    if encode_token(name) != token:
        raise ValueError(f"subject token {token!r} is not an encoded name")
    return name


def upload_bucket(fleet: str) -> str:
    """Return the name of the object store bucket for uploads of admins."""
    return f"{BUCKET}-{fleet}"


def session_bucket(fleet: str) -> str:
    """Return the name of the KV bucket for the sessions of agents."""
    return f"{BUCKET}-sessions-{fleet}"


def published_bucket(fleet: str, model: str) -> str:
    """Return the name of the bucket for uploads of publishers of `model`.

    A NATS permission can name a bucket, but no folder in it. A model name may have characters that are invalid in
    bucket names, so the bucket name has a hash of the model name.
    """
    return f"{upload_bucket(fleet)}-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one fleet.

    Raises:
        InvalidRequest: `fleet`, or a client or worker that a method receives, is not a valid subject token. A wildcard
            or a dot would reach subjects of others.
    """

    fleet: str

    def __post_init__(self) -> None:
        """Validate the name of the fleet."""
        check_subject_token("fleet", self.fleet)

    @property
    def _root(self) -> str:
        return f"{PREFIX}.{self.fleet}"

    def request(self, client: str, model: str, lane: Lane) -> str:
        """Return the subject on which `client` publishes requests for `model`."""
        return f"{self._root}.req.{check_subject_token('client', client)}.{encode_token(model)}.{lane}"

    def probe(self, model: str, lane: Lane) -> str:
        """Return the subject on which admins test whether a lane stores messages. No client has this name."""
        return f"{self._root}.req.~probe.{encode_token(model)}.{lane}"

    def requests_in(self, model: str, lane: Lane) -> str:
        """Return the subject of all requests for `model` in one lane, from any client."""
        return f"{self._root}.req.*.{encode_token(model)}.{lane}"

    def direct(self, client: str, worker: str) -> str:
        """Return the subject on which `client` sends direct requests to `worker`."""
        return self._pair("direct", client, worker)

    def directs_to(self, worker: str) -> str:
        """Return the subject of all direct requests to `worker`, from any client."""
        return f"{self._root}.direct.*.{check_subject_token('worker', worker)}"

    def plain(self, client: str) -> str:
        """Return the prefix of every `reply_to` of `client`."""
        return f"{self._root}.plain.{check_subject_token('client', client)}."

    def frame(self, client: str, worker: str) -> str:
        """Return the subject on which `worker` publishes frames for `client`."""
        return self._pair("frame", client, worker)

    def frames_to(self, client: str) -> str:
        """Return the subject of all frames for `client`."""
        return f"{self._root}.frame.{check_subject_token('client', client)}.*"

    def link(self, client: str, worker: str) -> str:
        """Return the subject on which `client` sends link messages to `worker`."""
        return self._pair("link", client, worker)

    def links_to(self, worker: str) -> str:
        """Return the subject of all link messages to `worker`, from any client."""
        return f"{self._root}.link.*.{check_subject_token('worker', worker)}"

    def presence(self, worker: str) -> str:
        """Return the subject on which `worker` publishes its presence."""
        return f"{self._root}.presence.{check_subject_token('worker', worker)}"

    def _pair(self, kind: str, client: str, worker: str) -> str:
        check_subject_token("client", client)
        check_subject_token("worker", worker)
        return f"{self._root}.{kind}.{client}.{worker}"

    @property
    def presences(self) -> str:
        """The subject of the presence of every worker."""
        return f"{self._root}.presence.*"

    def client(self, client: str) -> str:
        """Return the subject on which `client` publishes its presence."""
        return f"{self._root}.client.{check_subject_token('client', client)}"

    @property
    def clients(self) -> str:
        """The subject of the presence of every client."""
        return f"{self._root}.client.*"

    def control(self, controller: str) -> str:
        """Return the subject on which `controller` publishes commands."""
        return f"{self._root}.control.{check_subject_token('controller', controller)}"

    @property
    def controls(self) -> str:
        """The subject of the commands of every controller."""
        return f"{self._root}.control.*"

    def read(self, client: str, worker: str) -> str:
        """Return the subject on which `client` asks `worker` for its own requests, or for expert counts."""
        return self._pair("read", client, worker)

    def reads_to(self, worker: str) -> str:
        """Return the subject of all such reads of `worker`, from any client."""
        return f"{self._root}.read.*.{check_subject_token('worker', worker)}"

    def ack(self, controller: str, worker: str) -> str:
        """Return the subject on which `worker` publishes command acks for `controller`."""
        return self.acks_to(controller).removesuffix("*") + check_subject_token("worker", worker)

    def acks_to(self, controller: str) -> str:
        """Return the subject of all command acks for `controller`, from any worker."""
        return f"{self._root}.ack.{check_subject_token('controller', controller)}.*"

    @property
    def acks(self) -> str:
        """The subject of all command acks, from any worker to any controller."""
        return f"{self._root}.ack.*.*"

    def service(self, client: str) -> str:
        """Return the subject on which the HTTP service `client` publishes to the other services."""
        return f"{self._root}.service.{check_subject_token('client', client)}"

    @property
    def services(self) -> str:
        """The subject of the messages of every HTTP service."""
        return f"{self._root}.service.*"

    @property
    def ping(self) -> str:
        """The subject of earlier releases on which an empty message makes every worker publish its presence."""
        return f"{self._root}.ping"

    def ping_by(self, client: str) -> str:
        """Return the subject on which an empty message of `client` makes every worker publish its presence."""
        return f"{self._root}.ping.{check_subject_token('client', client)}"

    @property
    def pings(self) -> str:
        """The subject of the pings of every client."""
        return f"{self._root}.ping.*"
