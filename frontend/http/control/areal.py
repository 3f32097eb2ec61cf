"""The commands of AReaL's vLLM server, which the remote engine of AReaL 1.0 sends: its trainer needs no adapter.

AReaL counts versions itself, one for each update, and marks a token with the count when its answer arrives. A pause
therefore aborts the requests in flight, so that no answer has tokens of two versions. The client requests the rest.
"""

from typing import Final

from starlette.responses import Response

from .... import bus
from ....schemas.control import Pause
from ....schemas.decoding import JsonObject
from . import bodies, commands
from .commands import CommandCall

APPLIED: Final[JsonObject] = {"success": True}


async def pause(call: CommandCall[bodies.SendBody]) -> Response:
    """Pause workers as AReaL's server does: requests in flight end with `abort`, and the prefix cache is reset."""
    return await call.answer(call.fleet.send(Pause(mode="abort", clear_cache=True, **call.options)), "pause", APPLIED)


async def resume(call: CommandCall[bodies.SendBody]) -> Response:
    """Resume workers after a pause, under AReaL's name."""
    return await call.answer(call.fleet.resume(**call.options), "resume", APPLIED)


async def update_weights(call: CommandCall[bodies.ArealUpdateBody]) -> Response:
    """Replace the weights by those of a directory, under the next version. A pause before it stays."""

    async def update(version: int) -> bus.CommandResult:
        return await call.fleet.update_weights(call.fields.model_path, version=version, mode="abort", **call.options)

    work = commands.with_version(call.service, update, call.recorded_version, call.fields.model)
    return await call.answer(work, "update_weights", APPLIED, {"source": "model_path"})
