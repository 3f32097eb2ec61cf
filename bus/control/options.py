"""The keyword options of the commands to workers, as the methods of `Fleet` and of the publishers accept them."""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from ...schemas.checks import describe, unique_names
from ...schemas.control import PauseMode
from ...schemas.errors import InvalidRequest
from ...schemas.weights import Canary
from .controller import OnAck


class LoadOptions(TypedDict, total=False):
    """Options that every command and every publication accepts."""

    timeout_s: float
    """Seconds that each worker has to execute the command. Default: 60, or 600 for commands that load weights."""
    on_ack: OnAck | None
    """Called with each new ack, on the client's own thread. It must return immediately. Default: None."""


class DrainOptions(LoadOptions, total=False):
    """Options that every command accepts."""

    model: str | None
    """Model whose workers execute the command. None (default): workers of all models. Some commands need one model."""
    by: str | None
    """User of a service for whom it sends the command: `http:` and a name. None (default): the client itself."""


class SendOptions(DrainOptions, total=False):
    """Options that every command accepts except `drain`, which requires `workers` as an argument."""

    workers: Iterable[str] | None
    """Ids of the workers that execute the command; each must be live. None (default): all, including later ones."""


class SourceOptions(SendOptions, total=False):
    """Options of commands that load weights or an adapter."""

    objects: str | None
    """Source in the NATS object store, `<bucket>/<prefix>`, in place of a path. Default: None."""
    upload: bool
    """True: the path is on this machine, and the client uploads the folder to the object store for the workers.
    False (default): the path is on the workers' machines."""


class VersionOptions(LoadOptions, total=False):
    """Options of a new version of the weights."""

    mode: PauseMode
    """Handling of requests in flight during the update. `keep` (default): they continue with the new weights. `wait`:
    they finish first. `abort`: they end."""
    clear_cache: bool | None
    """True if workers reset the prefix cache. None (default): they reset it unless `mode` is `keep`."""
    allow_rollback: bool
    """Allow a version that is older than the present one, or the same version from another source. Default: False."""
    expected_canary: Canary | None
    """Output of the trainer's own copy of the weights for `rollbus.canary_request`. Workers compare their output with
    it. Default: None."""
    label: str | None
    """The trainer's name for this version, for example `step-42`. It is stored in the desired state. Default: None."""
    min_staged: int | None
    """Number of workers that must stage the weights within `timeout_s` before the fleet switches. The command does not
    wait for the others, which serve no requests until they have the weights. None (default): all workers must stage
    them."""


class UpdateOptions(SourceOptions, VersionOptions, total=False):
    """Options of `update_weights`."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], OnAck | None]:
    """Return the command fields of `options`, and the callback for acks."""
    fields = dict(options)
    on_ack = fields.pop("on_ack", None)
    if on_ack is not None and not callable(on_ack):
        raise InvalidRequest("on_ack", f"is {describe(on_ack)}", "a function, or None")
    if fields.get("workers") is not None:
        fields["workers"] = unique_names("workers", fields["workers"])
    return fields, on_ack
