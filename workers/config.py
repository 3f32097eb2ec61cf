"""How one worker is set up."""

import os
import socket
import uuid
from pathlib import Path

import msgspec

from ..bus.auth.credentials import Credentials, worker_identity
from ..bus.auth.tls import Tls
from ..bus.nats.server import Server
from ..schemas.checks import check_float, check_int, check_name, check_subject_token
from ..schemas.limits import MAX_WEIGHT_VERSION

__all__ = [
    "DEFAULT_ENGINE_TIMEOUT_S",
    "DEFAULT_LEASE_S",
    "DEFAULT_START_TIMEOUT_S",
    "LEASE_MARGIN_S",
    "WorkerConfig",
    "default_cache_dir",
]

DEFAULT_LEASE_S = 5.0
"""Five heartbeats: a busy machine may delay a few of them, and a dead worker is still noticed soon."""
DEFAULT_ENGINE_TIMEOUT_S = 300.0
"""Far above the longest step: that of a long prompt on a CPU."""

DEFAULT_START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk takes many minutes."""
LEASE_MARGIN_S = 1.0
"""A worker gives up this long before others may take it for dead, and takes others for dead this much later."""


def default_worker_id() -> str:
    """A name that is unique in practice: host, process and four random characters."""
    host = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"


def default_cache_dir() -> str:
    """Where this user's programs keep what they can fetch again."""
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(caches) / "rollbus")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know besides its engine; checked on construction (`InvalidRequest`)."""

    nats_url: str
    credentials: Credentials | None = None
    """Of the NATS user that it is; None: the server lets everybody in."""
    tls: Tls = Tls()
    """With which files the connection is protected."""
    replicas: int | None = None
    """Of the queue and the bucket, if the worker makes them; None: as many as is usual."""
    model: str
    """Served model name: what requests call it."""
    fleet: str = "default"
    worker_id: str = msgspec.field(default_factory=default_worker_id)
    weight_version: int = 0
    """Of the checkpoint that the engine loads at its start."""
    model_path: str | None = None
    """Where the checkpoint lies, for tools on the same machine that want its tokenizer."""
    lease_s: float = DEFAULT_LEASE_S
    """For how long an announcement is good."""
    listen_s: float | None = None
    """Seconds for which it listens for another worker of its id before it serves, while its engine loads; None: one
    lease. 0: it does not listen, because no other worker can have its id."""
    engine_timeout_s: float = DEFAULT_ENGINE_TIMEOUT_S
    """An engine that has requests and makes no step for so long counts as dead."""
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    """From the start of the worker; requests that wait for a worker do not wait longer for this one to serve."""
    max_held_bytes: int = 512 * 1024**2
    """Results that clients have not taken: above it no more requests are taken, above twice that some are given up."""
    weight_roots: tuple[str, ...] = ()
    """Folders below which commands may name checkpoints and adapters; none: no paths are taken."""
    cache_dir: str = msgspec.field(default_factory=default_cache_dir)
    """Where fetched checkpoints and adapters go: one copy for all workers of the fleet on this machine."""
    stage_bytes: int | None = None
    """Bytes that all of them may take there; None: what the disk has."""
    fetch_rate: int | None = None
    """Bytes in a second at which this worker fetches them; None: as fast as they come."""
    prove_reload: bool = True
    """At the start, load the checkpoint once more, and serve only if that changes nothing."""

    def __post_init__(self) -> None:
        """Check names and range."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("worker_id", self.worker_id)
        worker_identity(self.credentials, fleet=self.fleet, worker=self.worker_id)
        check_name("model", self.model)
        check_int("weight_version", self.weight_version, 0, MAX_WEIGHT_VERSION)
        check_float("lease_s", self.lease_s, 2 * LEASE_MARGIN_S, 60)
        if self.listen_s is not None:
            check_float("listen_s", self.listen_s, 0, 60)
        check_float("engine_timeout_s", self.engine_timeout_s, 0, 24 * 3600, above=True)
        check_float("start_timeout_s", self.start_timeout_s, 0, 24 * 3600, above=True)
        check_int("max_held_bytes", self.max_held_bytes, 1, 2**62)
        if self.stage_bytes is not None:
            check_int("stage_bytes", self.stage_bytes, 1, 2**62)
        if self.fetch_rate is not None:
            check_int("fetch_rate", self.fetch_rate, 1, 2**62)

    @property
    def server(self) -> Server:
        """Where it connects, and as whom."""
        return Server(self.nats_url, self.credentials, self.tls, self.replicas)
