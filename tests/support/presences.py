"""Presence and acks of workers, for tests without real workers."""

from typing import Any

from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.presence import Capabilities, WorkerPresence, WorkerState


def presence(**fields: Any) -> WorkerPresence:
    """Return the presence of an idle worker in the state `serving`; `fields` replace its values."""
    idle: dict[str, Any] = {
        "worker": "w",
        "incarnation": "1",
        "model": "m",
        "state": WorkerState.SERVING,
        "weight_version": 0,
        "in_flight": 0,
        "free_slots": 1,
        "uptime_s": 1.0,
        "lease_s": 10.0,
    }
    return WorkerPresence(**{**idle, **fields})


def ack(**fields: Any) -> Ack:
    """Return the ack of a worker that has applied a command; `fields` replace its values."""
    applied: dict[str, Any] = {
        "id": "c",
        "command": "pause",
        "worker": "w",
        "incarnation": "1",
        "model": "m",
        "status": AckStatus.APPLIED,
    }
    return Ack(**{**applied, **fields})


def capabilities(**fields: Any) -> Capabilities:
    """Return the capabilities of a small dense model; `fields` replace their values."""
    small: dict[str, Any] = {
        "engine": "e",
        "engine_version": "1",
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_logprobs": 5,
        "dtype": "float32",
    }
    return Capabilities(**{**small, **fields})
