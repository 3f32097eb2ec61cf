"""What vLLM's worker processes answer to the calls that `extension` adds: plain maps, which vLLM can carry."""

from typing import Any

from schemas.errors import ControlCode

__all__ = ["done", "failed"]


def done(**facts: Any) -> dict[str, Any]:
    """It was done; with what there is to say about it."""
    return {"code": None, "error": None, **facts}


def failed(code: ControlCode, error: BaseException | str) -> dict[str, Any]:
    """It was not done."""
    message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return {"code": str(code), "error": message}
