"""rollbus's message bus: how requests, chunks and announcements move, and the client that trainers use.

    import bus

    async with bus.connect("nats://127.0.0.1:4222") as rb:
        generation = await rb.complete(bus.GenerateRequest(prompt_token_ids=[1, 2, 3]))

If this docstring is not what `help(bus)` shows, another package called `bus` comes first on your path.
"""

from bus.client.client import Client, ClientStats, connect
from bus.client.fleet import Fleet, FleetState
from bus.client.generation import Generation
from bus.credentials import Credentials
from bus.protocol.canary import canary_request
from bus.protocol.ledger import CommandIncomplete, Ledger
from bus.queue.streams import QueueDepth
from bus.server import Server, Tls
from schemas.chunk import Chunk, FinishReason, RoutedExperts
from schemas.errors import (
    BusBroken,
    BusClosed,
    ControlCode,
    ControlError,
    ErrorCode,
    InvalidRequest,
    NoWorkers,
    PermissionDenied,
    RequestError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    RollbusError,
)
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams
from schemas.weights import Canary

__all__ = [
    "BusBroken",
    "BusClosed",
    "Canary",
    "Chunk",
    "Client",
    "ClientStats",
    "CommandIncomplete",
    "ControlCode",
    "ControlError",
    "Credentials",
    "ErrorCode",
    "FinishReason",
    "Fleet",
    "FleetState",
    "GenerateRequest",
    "Generation",
    "InvalidRequest",
    "Ledger",
    "NoWorkers",
    "PermissionDenied",
    "QueueDepth",
    "RequestError",
    "RequestFailed",
    "RequestRejected",
    "RequestTimeout",
    "RollbusError",
    "RoutedExperts",
    "SamplingParams",
    "Server",
    "Tls",
    "canary_request",
    "connect",
]
