"""The certificate that stands beside signatures: the fleet's root key says what a user may change."""

from typing import Annotated

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name, check_subject_token

__all__ = ["Certificate"]

Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]


class Certificate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user that signs with a key, and what that user may change. JSON, signed by the fleet's root key."""

    fleet: str
    """Nothing of another fleet."""
    role: Name
    """Of the user."""
    name: str
    """Of the user: commands count on its own subject only."""
    key: Annotated[str, Meta(max_length=64)]
    """The public key of its signatures: Ed25519, base64url."""
    models: tuple[Name, ...] | None = None
    """Whose commands, desired states and uploads it may sign; None: of every model."""
    commands: tuple[Name, ...] | None = None
    """Which commands it may give, by name; None: all."""

    def __post_init__(self) -> None:
        """Check the names."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("name", self.name)
        for model in self.models or ():
            check_name("models", model)

    def covers_model(self, model: str) -> bool:
        """It may change what concerns this model."""
        return self.models is None or model in self.models

    def covers_command(self, command: str) -> bool:
        """It may give this command."""
        return self.commands is None or command in self.commands

    @property
    def is_limited(self) -> bool:
        """It may not give every command for every model."""
        return self.models is not None or self.commands is not None
