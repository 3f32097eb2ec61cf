"""What crosses the wire: structs, codecs, limits, error codes. Needs only the standard library, msgspec and numpy."""

from schemas.chunk import Chunk, FinishReason, RoutedExperts
from schemas.errors import ErrorCode, InvalidRequest, RollbusError
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams

__all__ = [
    "Chunk",
    "ErrorCode",
    "FinishReason",
    "GenerateRequest",
    "InvalidRequest",
    "RollbusError",
    "RoutedExperts",
    "SamplingParams",
]
