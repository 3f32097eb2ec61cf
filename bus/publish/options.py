"""The options and the result of a publication. The arguments of the publisher's methods are checked here."""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypedDict

import msgspec

from ...schemas.checks import check_bool, check_float, check_int, describe
from ...schemas.control import LoadLora, UpdateWeights
from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_TIMEOUT_S
from ...schemas.weights import WeightSource
from ..auth.credentials import Credentials
from ..control.controller import OnAck, check_command
from ..control.options import LoadOptions, VersionOptions, split_options
from ..protocol.fleet.authority import Load
from ..protocol.fleet.command_result import CommandResult
from ..protocol.html import as_html
from ..protocol.weights.tensors import ADAPTER_CONFIG
from .draft import NamedTensors, TensorFeed
from .tensors import FolderFile, folder_tensors, read_checkpoint_folder

PENDING: Final = WeightSource(objects="pending/pending")
"""Placeholder for the source of a command until its version has a folder."""
MAX_WORKERS: Final = 1_000_000
"""Maximum of `min_staged`. No model has more workers."""
Adapter = str | os.PathLike[str] | NamedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions(Generic[Load]):
    """Options of the publication of a version, or of an adapter."""

    command: Load
    """Command that is sent after the commit. Its source is set then."""
    updates: bool
    """True if the fleet loads the version. False: the version is only stored."""
    min_staged: int | None = None
    ranks_timeout_s: float = 600.0
    """Seconds that rank 0 waits for the tensors of the other ranks, and that they wait for rank 0 to begin and to
    commit."""
    on_ack: OnAck | None = None
    started: float = field(default_factory=time.monotonic)
    """Monotonic time of the call."""


class ConnectOptions(TypedDict, total=False):
    """Options of the connection that a publisher without a client opens."""

    fleet: str | None
    """Name of the fleet, as in `rollbus.connect`. Default: None."""
    credentials: Credentials | str | os.PathLike[str] | None
    """Credentials of the NATS user, as in `rollbus.connect`. Default: None."""


class PublishSettings(VersionOptions, total=False):
    """Options of `publish`."""

    update: bool
    """True (default): the fleet loads the version after it is stored. False: the version is only stored."""
    ranks_timeout_s: float
    """Seconds that rank 0 waits for the other ranks, and that the other ranks wait for rank 0 to begin and to commit.
    Default: 600."""


class AdapterSettings(LoadOptions, total=False):
    """Options of `publish_adapter`."""

    config: Mapping[str, Any] | None
    """Content of `adapter_config.json`. Required if the adapter is given as tensors, else None (default)."""
    update: bool
    """True (default): the fleet loads the adapter after it is stored. False: the adapter is only stored."""


def publish_options(model: str, version: int, settings: PublishSettings) -> PublishOptions[UpdateWeights]:
    """Return the checked options of `publish`.

    Raises:
        InvalidRequest: an argument is wrong.
    """
    fields, updates, on_ack = _split(settings)
    min_staged = fields.pop("min_staged", None)
    if min_staged is not None:
        min_staged = check_int("min_staged", min_staged, 1, MAX_WORKERS)
    ranks_timeout_s = check_float("ranks_timeout_s", fields.pop("ranks_timeout_s", 600.0), 0, MAX_TIMEOUT_S)
    return PublishOptions(
        command=check_command(UpdateWeights(model=model, version=version, source=PENDING, **fields)),
        updates=updates,
        min_staged=min_staged,
        ranks_timeout_s=ranks_timeout_s,
        on_ack=on_ack,
    )


def adapter_options(model: str, name: str, version: int, settings: AdapterSettings) -> PublishOptions[LoadLora]:
    """Return the checked options of `publish_adapter`.

    Raises:
        InvalidRequest: an argument is wrong.
    """
    fields, updates, on_ack = _split(settings)
    fields.pop("config", None)
    command = check_command(LoadLora(model=model, name=name, version=version, source=PENDING, **fields))
    return PublishOptions(command=command, updates=updates, on_ack=on_ack)


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool, OnAck | None]:
    """Return the command fields, True if the fleet loads the version, and the callback for acks."""
    fields, on_ack = split_options(settings)
    return fields, check_bool("update", fields.pop("update", True)), on_ack


def read_adapter(adapter: Adapter, config: Mapping[str, Any] | None) -> tuple[TensorFeed, dict[str, FolderFile]]:
    """Return the tensors and the other files of an adapter. This blocks.

    Raises:
        InvalidRequest: the folder cannot be read, or `config` is missing, not valid JSON, or set together with a
            folder.
    """
    if isinstance(adapter, str | os.PathLike):
        if config is not None:
            raise InvalidRequest("config", "is set together with a folder", "the folder's own file")
        return TensorFeed(folder_tensors(adapter)), read_checkpoint_folder(adapter).files
    if not isinstance(config, Mapping):
        allowed = f"the content of {ADAPTER_CONFIG}, together with tensors"
        raise InvalidRequest("config", f"is {describe(config)}", allowed)
    try:
        data = msgspec.json.encode(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("config", f"is not valid JSON: {error}", "JSON types") from None
    return TensorFeed(adapter), {ADAPTER_CONFIG: FolderFile(data, hashlib.sha256(data).hexdigest())}


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version."""

    version: int
    """Weight version."""
    objects: str
    """Folder of the version, `<bucket>/<prefix>`. Pass it to `update_weights` as `objects`."""
    digest: str
    """Digest of the content."""
    is_anchor: bool
    """True if the whole checkpoint was stored, False if only the changes were stored."""
    num_tensors: int
    """Number of tensors of the version."""
    num_changed: int
    """Number of tensors with any change."""
    model_bytes: int
    """Bytes of all tensors."""
    stored_bytes: int
    """Bytes of the stored objects."""
    compare_s: float
    """Seconds in which tensors were read, compared, encoded and hashed."""
    upload_s: float
    """Seconds from the first complete object until all objects were stored. It overlaps with `compare_s`."""
    seconds: float
    """Seconds from the call until the commit, or until the end of the update if there is one."""
    ledger: CommandResult | None = None
    """Result of the fleet's update. None if no update was requested, or if this is not rank 0."""

    def __repr__(self) -> str:
        """Return one line with the version, its size and the update."""
        kind = "anchor" if self.is_anchor else "delta"
        result = "" if self.ledger is None else f", {self.ledger!r}"
        return (
            f"<PublishedWeights version={self.version} {kind} changed={self.num_changed} of {self.num_tensors} tensors "
            f"stored={self.stored_bytes} of {self.model_bytes} bytes in {self.seconds:.2f} s{result}>"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("stored", f"{'anchor' if self.is_anchor else 'delta'} of {self.stored_bytes:,} bytes"),
            ("model", f"{self.model_bytes:,} bytes"),
            ("changed", f"{self.num_changed} of {self.num_tensors} tensors"),
            ("seconds", f"{self.seconds:.2f}"),
            ("objects", self.objects),
        ]
        return as_html(f"Weights, version {self.version}", rows) + (
            "" if self.ledger is None else self.ledger._repr_html_()
        )
