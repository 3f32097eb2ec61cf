"""The wire format: structs, codecs, limits and error codes. Needs only the standard library, msgspec and numpy."""

from .chunk import Chunk, FinishReason, RoutedExperts
from .errors import ErrorCode, InvalidRequest, RollbusError
from .request import GenerateRequest
from .sampling import SamplingParams

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
