"""What vLLM's worker processes answer to the calls that `extension` adds: plain maps, which vLLM can carry."""

from typing import Any

from ....schemas.errors import ControlCode

__all__ = ["done", "failed"]


def done(**facts: Any) -> dict[str, Any]:
    """It was done; with what there is to say about it."""
    return {"code": None, "error": None, **facts}


def failed(code: ControlCode, error: object) -> dict[str, Any]:
    """It was not done; `error` says why."""
    return {"code": str(code), "error": str(error)}
