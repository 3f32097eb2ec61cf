"""Answers of vLLM worker processes to the calls that `extension` adds. They are plain maps, which vLLM can transfer."""

from typing import Any

from ....schemas.errors import ControlCode

__all__ = ["done", "failed"]


def done(**facts: Any) -> dict[str, Any]:
    """Return the answer of a successful call, with `facts` as additional fields."""
    return {"code": None, "error": None, **facts}


def failed(code: ControlCode, error: object) -> dict[str, Any]:
    """Return the answer of a failed call; `error` states the reason."""
    return {"code": str(code), "error": str(error)}
