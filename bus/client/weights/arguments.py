"""The arguments of a publisher's methods, and the checks that turn them into options."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict

import msgspec

from ....schemas.checks import check_bool, check_float, check_int, describe
from ....schemas.control import Canary, LoadLora, PauseMode, UpdateWeights, WeightSource
from ....schemas.errors import InvalidRequest
from ....schemas.limits import MAX_TIMEOUT_S
from ...auth.credentials import Credentials
from ...control.ack_collector import OnAck
from ...control.controller import check_command
from .checkpoint import FolderFile, folder_tensors, read_checkpoint_folder
from .feed import NamedTensors, TensorFeed
from .options import AdapterOptions, PublishOptions

__all__ = [
    "Adapter",
    "AdapterSettings",
    "ConnectOptions",
    "PublishSettings",
    "adapter_options",
    "publish_options",
    "read_adapter",
]

ADAPTER_CONFIG: Final = "adapter_config.json"
"""PEFT's name for an adapter's configuration."""
PENDING: Final = WeightSource(objects="pending/pending")
"""Source of a command until its version has a folder."""

MAX_WORKERS: Final = 1_000_000
"""Bound of `min_staged`: no model has so many workers."""

Adapter = str | os.PathLike[str] | NamedTensors


class ConnectOptions(TypedDict, total=False):
    """Options of the connection that a publisher opens if it has no client."""

    fleet: str | None
    """As in `rollbus.connect`."""
    credentials: Credentials | str | os.PathLike[str] | None
    """As in `rollbus.connect`."""


class PublishSettings(TypedDict, total=False):
    """Further arguments of `publish`."""

    update: bool
    """Have the fleet load the version, once it is stored. Default: True."""
    mode: PauseMode
    """As in `Fleet.update_weights`; the default is `keep`."""
    clear_cache: bool | None
    """As in `Fleet.update_weights`."""
    allow_rollback: bool
    """Allow a version that is not newer than the present one. Default: False."""
    expected_canary: Canary | None
    """The answer of the trainer's own copy of the weights to `rollbus.canary_request`."""
    label: str | None
    """The trainer's name for this version, for example `step-42`."""
    min_staged: int | None
    """As in `Fleet.update_weights`: switch as soon as so many workers have staged it. Default: all must have."""
    timeout_s: float
    """Seconds that each worker has to load the version. Default: 600."""
    ranks_timeout_s: float
    """Seconds that rank 0 waits for the others, and that they wait for rank 0 to begin and to commit. Default: 600."""
    on_ack: OnAck | None
    """Called with each answer of a worker, on the client's own thread; must return at once."""


class AdapterSettings(TypedDict, total=False):
    """Further arguments of `publish_adapter`."""

    config: Mapping[str, Any] | None
    """Content of `adapter_config.json`, if the adapter is given as tensors."""
    update: bool
    """Have the fleet load the adapter, once it is stored. Default: True."""
    timeout_s: float
    """Seconds that each worker has to load the version. Default: 600."""
    on_ack: OnAck | None
    """Called with each answer of a worker, on the client's own thread; must return at once."""


def publish_options(model: str, version: int, settings: PublishSettings) -> PublishOptions:
    """Check the arguments of `publish`."""
    fields, updates, on_ack = _split(settings)
    min_staged = fields.pop("min_staged", None)
    if min_staged is not None:
        min_staged = check_int("min_staged", min_staged, 1, MAX_WORKERS)
    ranks_timeout_s = check_float("ranks_timeout_s", fields.pop("ranks_timeout_s", 600.0), 0, MAX_TIMEOUT_S)
    with _as_arguments():
        command = UpdateWeights(model=model, version=version, source=PENDING, **fields)
    return PublishOptions(
        command=check_command(command),
        updates=updates,
        min_staged=min_staged,
        ranks_timeout_s=ranks_timeout_s,
        on_ack=on_ack,
    )


def adapter_options(model: str, name: str, version: int, settings: AdapterSettings) -> AdapterOptions:
    """Check the arguments of `publish_adapter`."""
    fields, updates, on_ack = _split(settings)
    fields.pop("config", None)
    with _as_arguments():
        command = LoadLora(model=model, name=name, version=version, source=PENDING, **fields)
    return AdapterOptions(command=check_command(command), updates=updates, on_ack=on_ack)


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool, OnAck | None]:
    """Return the fields of a command, whether the fleet loads the version, and the callback for answers."""
    fields = dict(settings)
    updates = check_bool("update", fields.pop("update", True))
    on_ack = fields.pop("on_ack", None)
    if on_ack is not None and not callable(on_ack):
        raise InvalidRequest(field="on_ack", problem=f"is {describe(on_ack)}", allowed="a function, or None")
    return fields, updates, on_ack


@contextlib.contextmanager
def _as_arguments() -> Iterator[None]:
    """Raise an error about the method's arguments if a command has no field of a name."""
    try:
        yield
    except TypeError as error:
        problem = f"are wrong: {error}"
        raise InvalidRequest(field="arguments", problem=problem, allowed="those of the method") from None


def read_adapter(adapter: Adapter, config: Mapping[str, Any] | None) -> tuple[TensorFeed, dict[str, FolderFile]]:
    """Return an adapter's tensors and its other files. Blocks."""
    if isinstance(adapter, str | os.PathLike):
        if config is not None:
            raise InvalidRequest(field="config", problem="is set beside a folder", allowed="the folder's own")
        return TensorFeed(folder_tensors(adapter)), read_checkpoint_folder(adapter).files
    if not isinstance(config, Mapping):
        allowed = f"the content of {ADAPTER_CONFIG}, beside tensors"
        raise InvalidRequest(field="config", problem=f"is {describe(config)}", allowed=allowed)
    try:
        data = msgspec.json.encode(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field="config", problem=f"is no JSON: {error}", allowed="JSON's types") from None
    return TensorFeed(adapter), {ADAPTER_CONFIG: FolderFile(data, hashlib.sha256(data).hexdigest())}
