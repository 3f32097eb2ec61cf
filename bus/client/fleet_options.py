"""Common options of the fleet's commands, besides the arguments of each command, and their checks."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from ...schemas.checks import check_bool, describe
from ...schemas.control import PauseMode
from ...schemas.errors import InvalidRequest
from ...schemas.weights import Canary, WeightSource
from ..control.ack_collector import OnAck

__all__ = [
    "DrainOptions",
    "Path",
    "SendOptions",
    "SourceOptions",
    "UpdateOptions",
    "pop_source",
    "source_of",
    "split_options",
    "unique_names",
]

Path = str | os.PathLike[str]


class DrainOptions(TypedDict, total=False):
    """Options that every command accepts."""

    model: str | None
    """Model whose workers execute the command. None (default): workers of all models. Some commands need one model."""
    timeout_s: float
    """Seconds that each worker has to execute the command. Default: 60, or 600 for commands that load weights."""
    by: str | None
    """User of a service for whom it sends the command: `http:` and a name. None (default): the client itself."""
    on_ack: OnAck | None
    """Called with each new ack, on the client's own thread. It must return immediately. Default: None."""


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


class UpdateOptions(SourceOptions, total=False):
    """Options of `update_weights`."""

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


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], OnAck | None]:
    """Return the command fields of `options`, and the callback for acks."""
    fields = dict(options)
    on_ack = fields.pop("on_ack", None)
    if on_ack is not None and not callable(on_ack):
        raise InvalidRequest(field="on_ack", problem=f"is {describe(on_ack)}", allowed="a function, or None")
    if fields.get("workers") is not None:
        fields["workers"] = unique_names("workers", fields["workers"])
    return fields, on_ack


def pop_source(path: Path | None, fields: dict[str, Any]) -> tuple[WeightSource, bool]:
    """Return the source, and True if it must be uploaded. Remove both options from `fields`."""
    objects = fields.pop("objects", None)
    upload = check_bool("upload", fields.pop("upload", False))
    source = source_of(path, objects)
    if upload and source.path is None:
        raise InvalidRequest(field="upload", problem="is set without a path", allowed="a path, or upload=False")
    return source, upload


def source_of(path: object, objects: str | None) -> WeightSource:
    """Return the source that these arguments name.

    Raises:
        InvalidRequest: `path` is no path.
    """
    if path is None:
        return WeightSource(objects=objects)
    folder: object = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise InvalidRequest(field="path", problem=f"is {describe(path)}", allowed="the path of a folder")
    return WeightSource(path=folder, objects=objects)


def unique_names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once. Reject a plain string, whose letters would become names."""
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidRequest(field=field, problem=f"is {describe(names)}", allowed="a list of ids")
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequest(field=field, problem=f"has {describe(name)}", allowed="a list of ids")
        found[name] = None
    return tuple(found)
