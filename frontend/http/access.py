"""Who may call which routes: bearer tokens, compared in constant time."""

import hmac

from starlette.requests import Request

from frontend.http.errors import HttpError

__all__ = ["check_access"]


def check_access(request: Request, *tokens: str | None) -> None:
    """Let in who has one of `tokens`; everybody, if the first is None.

    Raises:
        HttpError: 401.
    """
    if tokens[0] is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        for token in tokens:
            if token is not None and hmac.compare_digest(given.strip().encode(), token.encode()):
                return
    problem = "is wrong" if scheme else "is missing"
    raise HttpError(
        401,
        f"the bearer token {problem}; allowed: Authorization: Bearer TOKEN",
        code="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )
