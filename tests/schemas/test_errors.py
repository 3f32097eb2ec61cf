"""The error codes and their exceptions."""

import pytest

from rollbus.schemas.errors import (
    ERRORS,
    ErrorCode,
    InvalidRequest,
    NoWorkers,
    RequestError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    request_error,
)


@pytest.mark.proves("P94")
def test_every_error_code_has_a_meaning_a_responsible_party_and_a_retry_value() -> None:
    """Each error code has a meaning, a responsible party, and a value for whether a retry can succeed."""
    assert list(ERRORS) == list(ErrorCode)
    for facts in ERRORS.values():
        assert facts.meaning
        assert facts.fault in {"client", "worker", "fleet", "network"}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_becomes_the_exception_of_its_kind(code: ErrorCode) -> None:
    """The error of a terminal chunk has the exception of its kind: rejected, failed after acceptance, or timed out."""
    error = request_error(code, "text", request_id="r", field="f", problem="is bad", allowed="good")
    special: dict[ErrorCode, type[RequestError]] = {
        ErrorCode.INVALID_REQUEST: InvalidRequest,
        ErrorCode.NO_WORKERS: NoWorkers,
        ErrorCode.TIMEOUT: RequestTimeout,
    }
    expected = special.get(code, RequestFailed if ERRORS[code].admitted else RequestRejected)

    assert type(error) is expected
    assert (error.code, error.request_id, error.retryable) == (code, "r", ERRORS[code].retryable)
    assert isinstance(error, RequestRejected) or ERRORS[code].admitted
    assert str(error).startswith(f"{code}: ")
    assert str(error).endswith("(request r)")


def test_an_invalid_request_without_a_field_is_still_rejected() -> None:
    """A worker may reject a request for a reason that concerns no single field."""
    error = request_error(ErrorCode.INVALID_REQUEST, "too many things at once")

    assert type(error) is RequestRejected
    assert str(error) == "invalid_request: too many things at once"
