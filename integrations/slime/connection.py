"""The connection of a process of slime or vime to the fleet, and its settings in `args`."""

import functools
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ... import sync
from ...schemas.checks import check_float, check_int
from ...schemas.errors import InvalidRequest
from ...schemas.limits import DEFAULT_MAX_IN_FLIGHT, MAX_IN_FLIGHT, MAX_TIMEOUT_S

PREFIX: Final = "rollbus_"


class Settings(NamedTuple):
    """What `--custom-config-path` may set, as `rollbus_nats` and so on."""

    nats: str | None = None
    """URL of the NATS server. None: as in `rollbus.connect`."""
    fleet: str = "default"
    """Name of the fleet."""
    model: str | None = None
    """Served name of the model. None: the only model of the fleet."""
    credentials: str | None = None
    """File with the credentials of a NATS user."""
    timeout_s: float | None = None
    """Seconds for each request. None: the default of `GenerateRequest`."""
    concurrency: int = DEFAULT_MAX_IN_FLIGHT
    """Samples that a process generates at the same time."""


def read_settings(args: Any) -> Settings:
    """Return the settings in the attributes `rollbus_*` of slime's arguments.

    Raises:
        InvalidRequest: an attribute is unknown or has a wrong value.
    """
    given: Mapping[str, Any] = {
        name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)
    }
    for name in given:
        if name not in Settings._fields:
            allowed = ", ".join(PREFIX + field for field in Settings._fields)
            raise InvalidRequest(field=PREFIX + name, problem="is unknown", allowed=allowed)
    for name in ("nats", "fleet", "model", "credentials"):
        value = given.get(name)
        if value is not None and not (isinstance(value, str) and value):
            raise InvalidRequest(field=PREFIX + name, problem=f"is {value!r}", allowed="text, or unset")
    found = Settings(**{name: value for name, value in given.items() if value is not None})
    timeout_s = found.timeout_s
    if timeout_s is not None:
        timeout_s = check_float(PREFIX + "timeout_s", timeout_s, 0, MAX_TIMEOUT_S, above=True)
    concurrency = check_int(PREFIX + "concurrency", found.concurrency, 1, MAX_IN_FLIGHT)
    return found._replace(timeout_s=timeout_s, concurrency=concurrency)


def connect(settings: Settings) -> sync.BlockingClient:
    """Return a new client of the fleet, which connects at its first use."""
    return sync.connect(settings.nats, fleet=settings.fleet, credentials=settings.credentials)


def shared_client(settings: Settings) -> sync.BlockingClient:
    """Return the client of this process, which closes when the process exits. Any event loop may use it."""
    return _client_of(os.getpid(), settings)


@functools.cache
def _client_of(_pid: int, settings: Settings) -> sync.BlockingClient:
    # A forked process cannot use the client of its parent.
    return connect(settings)
