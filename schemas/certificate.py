"""The certificate beside a signature: the fleet's root key states what a user may change."""

from typing import Annotated

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name, check_subject_token

__all__ = ["Certificate"]

Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]


class Certificate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user that signs with a key, and the permissions of that user. JSON, signed by the fleet's root key."""

    fleet: str
    """Name of the fleet. Other fleets reject the certificate."""
    role: Name
    """Role of the user."""
    name: str
    """Name of the user. Commands of this user are valid only on the user's own subject."""
    key: Annotated[str, Meta(max_length=64)]
    """Public key of the user's signatures: Ed25519, base64url."""
    models: tuple[Name, ...] | None = None
    """Models whose commands, desired states and uploads the user may sign; None: every model."""
    commands: tuple[Name, ...] | None = None
    """Names of the commands that the user may send; None: all commands."""

    def __post_init__(self) -> None:
        """Check the names."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("name", self.name)
        for model in self.models or ():
            check_name("models", model)

    def covers_model(self, model: str) -> bool:
        """Return True if the user may change this model."""
        return self.models is None or model in self.models

    def covers_command(self, command: str) -> bool:
        """Return True if the user may send this command."""
        return self.commands is None or command in self.commands

    @property
    def is_limited(self) -> bool:
        """True if the user may not send every command for every model."""
        return self.models is not None or self.commands is not None
