"""What the commands of a fleet take besides their own arguments."""

import os
from collections.abc import Iterable
from typing import TypedDict

from ...schemas.control import Canary, PauseMode
from ..control.ack_collector import OnAck

__all__ = ["DrainOptions", "Path", "SendOptions", "SourceOptions", "UpdateOptions"]

Path = str | os.PathLike[str]


class DrainOptions(TypedDict, total=False):
    """What every command takes."""

    model: str | None
    """Whose workers it concerns; None, the default: those of every model, of which some commands allow only one."""
    timeout_s: float
    """For each worker to carry it out; the default is 60, or 600 for what loads weights."""
    on_ack: OnAck | None
    """Called with each answer that is news, on the client's own thread; must return at once."""


class SendOptions(DrainOptions, total=False):
    """What every command takes but `drain`, which has no default for it."""

    workers: Iterable[str] | None
    """Which of them, by id; each must be there. None, the default: all, also those that start later."""


class SourceOptions(SendOptions, total=False):
    """What commands take that load something."""

    objects: str | None
    """`<bucket>/<prefix>` in NATS's object store, instead of a path."""
    upload: bool
    """The path is on this machine: the workers get the folder through the object store. Default: it is on theirs."""


class UpdateOptions(SourceOptions, total=False):
    """What `update_weights` takes."""

    mode: PauseMode
    """What becomes of the requests in flight meanwhile; the default, `keep`: they go on with the new weights."""
    clear_cache: bool | None
    """Forget the prefix cache; None, the default: unless `mode` is `keep`."""
    allow_rollback: bool
    """The version may be older than the present one, or the same with another source. Default: False."""
    expected_canary: Canary | None
    """What the trainer's own copy of the weights makes of `rollbus.canary_request`; workers compare theirs with it."""
    label: str | None
    """What the trainer calls this version, for example `step-42`; kept with the desired state."""
    min_staged: int | None
    """Switch as soon as so many workers have staged the weights within `timeout_s`. The others serve nothing until they
    have them, and are not waited for. None, the default: all must have staged them."""
