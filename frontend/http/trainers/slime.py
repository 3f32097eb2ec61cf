"""Routes of SGLang's server by which slime updates an engine that it has not started. Samples come over NATS.

Source: THUDM/slime, commit 624b824a898ab0ec1fcb4d373004c7f3852bf515: `slime/backends/sglang_utils/sglang_engine.py` and
`slime/ray/actor_group.py`. With `--update-weight-transport disk`, it writes a checkpoint, pauses each engine, resets
its cache, loads the checkpoint, and continues.
"""

from dataclasses import replace
from typing import Final, Literal

from starlette.responses import Response

from ....schemas.limits import NonEmptyName as Name
from ..control import command_route
from ..control.answers import VLLM
from ..control.bodies import Path, SendBody
from ..control.commands import CommandCall, pause, resume
from ..service import RouteTable
from .vime import reload


class DiskBody(SendBody, frozen=True, kw_only=True):
    """Replace the weights by a checkpoint on a disk of the workers."""

    model_path: Path
    """Folder on the workers' machines, below one of their weight roots."""
    weight_version: Name | None = None
    """slime's number, which the name of its folder has too. It has no effect."""
    load_format: Literal["auto"] | None = None
    """SGLang's field. Only `auto` is allowed: the format is that of the files."""


async def update_from_disk(call: CommandCall[DiskBody]) -> Response:
    """Replace the weights of all workers by a checkpoint on disk, under SGLang's name."""
    return await reload(call, call.fields.model_path, "model_path", {"success": True, "message": "ok"})


async def flush(call: CommandCall[SendBody]) -> Response:
    """Reset the prefix caches, also of requests that a pause holds, under SGLang's name."""
    return await call.answer(call.fleet.flush_cache(preempt=True, **call.options), "flush_cache", {"success": True})


ADMIN_ROUTES: Final[RouteTable] = {
    ("POST", "/pause_generation"): command_route(pause, VLLM),
    ("POST", "/continue_generation"): command_route(resume, VLLM),
    ("GET", "/flush_cache"): replace(command_route(flush, VLLM), body=None),
    ("POST", "/update_weights_from_disk"): command_route(update_from_disk, VLLM),
}
"""Routes that change the fleet."""
