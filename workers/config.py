"""How one worker is set up."""

import os
import socket
import uuid

import msgspec

from schemas.checks import check_int, check_name, check_subject_token
from schemas.limits import MAX_WEIGHT_VERSION

__all__ = ["WorkerConfig"]


def default_worker_id() -> str:
    """A name that is unique in practice: host, process and four random characters."""
    host = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:4]}"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know besides its engine; checked on construction (`InvalidRequest`)."""

    nats_url: str
    model: str
    """Served model name: what requests call it."""
    fleet: str = "default"
    worker_id: str = msgspec.field(default_factory=default_worker_id)
    weight_version: int = 0
    """Of the checkpoint that the engine loads at its start."""
    model_path: str | None = None
    """Where the checkpoint lies, for tools on the same machine that want its tokenizer."""

    def __post_init__(self) -> None:
        """Check names and range."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("worker_id", self.worker_id)
        check_name("model", self.model)
        check_int("weight_version", self.weight_version, 0, MAX_WEIGHT_VERSION)
