"""The configuration of one worker."""

import os
import socket
import uuid
from pathlib import Path

import msgspec

from ..bus.auth.credentials import Credentials, Tls, worker_identity
from ..bus.nats.server import Server
from ..bus.protocol.fleet.leases import LEASE_MARGIN_S
from ..schemas.checks import check_float, check_int, check_name, check_subject_token
from ..schemas.limits import MAX_WEIGHT_VERSION
from ..schemas.options import (
    DEFAULT_DRAIN_S,
    DEFAULT_ENGINE_TIMEOUT_S,
    DEFAULT_IDLE_S,
    DEFAULT_LEASE_S,
    DEFAULT_START_TIMEOUT_S,
    MAX_DRAIN_S,
)


def default_worker_id() -> str:
    """Return an id that is unique in practice: host, process id and four random characters."""
    host = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"


def default_cache_dir() -> str:
    """Return this user's cache folder for files that can be fetched again."""
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(caches) / "rollbus")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a worker, without that of its engine. The constructor raises `InvalidRequest`."""

    nats_url: str
    """URL of the NATS server, or several URLs with commas for a cluster."""
    credentials: Credentials | None = None
    """Credentials of the NATS user, or None if the server accepts every connection."""
    tls: Tls = Tls()
    """TLS files of the connection."""
    replicas: int | None = None
    """Number of replicas of the queue and the bucket if the worker creates them, or None for the cluster's default."""
    model: str
    """Name of the served model in requests."""
    fleet: str = "default"
    """Name of the fleet."""
    worker_id: str = msgspec.field(default_factory=default_worker_id)
    """Id of the worker, a subject token. Default: host name, process id and four random characters."""
    incarnation: str | None = None
    """First incarnation, which the process that starts this worker announces. None: a random one."""
    weight_version: int = 0
    """Version of the checkpoint that the engine loads at its start."""
    model_path: str | None = None
    """Path of the checkpoint, for tools on the same machine that need its tokenizer."""
    lease_s: float = DEFAULT_LEASE_S
    """Seconds for which presence is valid."""
    listen_s: float | None = None
    """Seconds for which the worker listens for another worker with its id before it serves, while its engine loads.
    None means one lease. 0 means not to listen, because no other worker can have this id."""
    engine_timeout_s: float = DEFAULT_ENGINE_TIMEOUT_S
    """Seconds without a step after which an engine with open requests counts as dead."""
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    """Seconds after the worker's start until requests no longer wait for this worker to serve."""
    drain_s: float = DEFAULT_DRAIN_S
    """Maximum seconds for which a worker that stops or drains itself waits until its clients have acknowledged
    everything."""
    max_held_bytes: int = 512 * 1024**2
    """Bytes of results that clients have not acknowledged. Above this value, the worker pulls no requests. Above twice
    this value, it fails open requests."""
    weight_roots: tuple[str, ...] = ()
    """Folders with the checkpoints and adapters that commands may name. If empty, commands may name no path."""
    cache_dir: str = msgspec.field(default_factory=default_cache_dir)
    """Folder for fetched checkpoints and adapters, with one copy for all workers of the fleet on this machine."""
    stage_bytes: int | None = None
    """Maximum bytes of all fetched files in `cache_dir`, or None if only the disk is the limit."""
    fetch_rate: int | None = None
    """Maximum bytes per second at which this worker fetches files, or None without a limit."""
    transfer_idle_s: float = DEFAULT_IDLE_S
    """Seconds without a command after which the worker ends an open transfer of weights."""
    prove_reload: bool = True
    """True to load the checkpoint a second time at the start, and to serve only if the outputs stay the same."""

    def __post_init__(self) -> None:
        """Validate names and ranges."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("worker_id", self.worker_id)
        worker_identity(self.credentials, fleet=self.fleet, worker=self.worker_id)
        check_name("model", self.model)
        if self.incarnation is not None:
            check_name("incarnation", self.incarnation)
        check_int("weight_version", self.weight_version, 0, MAX_WEIGHT_VERSION)
        check_float("lease_s", self.lease_s, 2 * LEASE_MARGIN_S, 60)
        if self.listen_s is not None:
            check_float("listen_s", self.listen_s, 0, 60)
        check_float("engine_timeout_s", self.engine_timeout_s, 0, 24 * 3600, above=True)
        check_float("start_timeout_s", self.start_timeout_s, 0, 24 * 3600, above=True)
        check_float("transfer_idle_s", self.transfer_idle_s, 0, 24 * 3600, above=True)
        check_float("drain_s", self.drain_s, 0, MAX_DRAIN_S)
        check_int("max_held_bytes", self.max_held_bytes, 1, 2**62)
        if self.stage_bytes is not None:
            check_int("stage_bytes", self.stage_bytes, 1, 2**62)
        if self.fetch_rate is not None:
            check_int("fetch_rate", self.fetch_rate, 1, 2**62)

    @property
    def server(self) -> Server:
        """The NATS server, with credentials and TLS files."""
        return Server(self.nats_url, self.credentials, self.tls, self.replicas)
