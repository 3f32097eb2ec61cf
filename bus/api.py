"""The transport of requests, chunks and presence, and the client that trainers use.

The public names are part of `rollbus` itself: `rollbus.connect`, `rollbus.GenerateRequest` and the rest of this list.
"""

from ..schemas.chunk import Chunk, FinishReason, RoutedExperts
from ..schemas.errors import (
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
    ServerUnreachable,
    TlsFailed,
)
from ..schemas.request import GenerateRequest
from ..schemas.sampling import SamplingParams
from ..schemas.weights import Canary
from .auth.credentials import Credentials, Tls
from .client.batches import BatchTimes
from .client.client import Client, connect
from .client.config import ClientStats
from .client.fleet import Fleet
from .client.fleet_state import FleetState
from .client.generation import Generation, Group, GroupStats, GroupStep, SampleKey
from .client.groups import GroupPrompt, GroupSampler
from .client.record_reader import RunRecord, SampleScore, read_record
from .client.record_writer import RunRecorder
from .nats.server import Server
from .protocol.fleet.canary import canary_request
from .protocol.fleet.command_result import CommandIncomplete, CommandResult
from .protocol.stream.result_arrays import TokenMasks
from .protocol.telemetry.experts import ExpertAnswers
from .protocol.telemetry.requests import RequestList, RequestTrace, WorkerTimeline
from .publish.options import PublishedWeights
from .publish.publisher import WeightPublisher
from .publish.tensors import RawTensor
from .queue.streams import QueueDepth

__all__ = [
    "BatchTimes",
    "BusBroken",
    "BusClosed",
    "Canary",
    "Chunk",
    "Client",
    "ClientStats",
    "CommandIncomplete",
    "CommandResult",
    "ControlCode",
    "ControlError",
    "Credentials",
    "ErrorCode",
    "ExpertAnswers",
    "FinishReason",
    "Fleet",
    "FleetState",
    "GenerateRequest",
    "Generation",
    "Group",
    "GroupPrompt",
    "GroupSampler",
    "GroupStats",
    "GroupStep",
    "InvalidRequest",
    "NoWorkers",
    "PermissionDenied",
    "PublishedWeights",
    "QueueDepth",
    "RawTensor",
    "RequestError",
    "RequestFailed",
    "RequestList",
    "RequestRejected",
    "RequestTimeout",
    "RequestTrace",
    "RollbusError",
    "RoutedExperts",
    "RunRecord",
    "RunRecorder",
    "SampleKey",
    "SampleScore",
    "SamplingParams",
    "Server",
    "ServerUnreachable",
    "Tls",
    "TlsFailed",
    "TokenMasks",
    "WeightPublisher",
    "WorkerTimeline",
    "canary_request",
    "connect",
    "read_record",
]
