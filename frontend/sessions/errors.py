"""The errors of sessions that name no field of a request."""

from ...schemas.errors import RollbusError


class SessionError(RollbusError):
    """A session cannot do what was asked.

    Attributes:
        code: `session_ended`, `session_limit`, `unknown_session`, `rows_missing` or `special_token_in_content`.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)
