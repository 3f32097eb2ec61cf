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
from .auth.credentials import Credentials
from .auth.tls import Tls
from .client.batch_times import BatchTimes
from .client.client import Client
from .client.connect import connect
from .client.fleet import Fleet
from .client.fleet_state import FleetState
from .client.generation import Generation, SampleKey
from .client.group_prompts import GroupPrompt
from .client.group_results import Group, GroupStats, GroupStep
from .client.group_sampler import GroupSampler
from .client.record.reader import RunRecord, SampleScore, read_record
from .client.record.writer import RunRecorder
from .client.runtime import ClientStats
from .client.weights.publisher import WeightPublisher
from .client.weights.results import PublishedWeights
from .client.weights.tensors import RawTensor
from .nats.server import Server
from .protocol.fleet.canary import canary_request
from .protocol.fleet.command_result import CommandIncomplete, CommandResult
from .protocol.stream.token_masks import TokenMasks
from .protocol.telemetry.expert_answers import ExpertAnswers
from .protocol.telemetry.request_trace import RequestList, RequestTrace, WorkerTimeline
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
