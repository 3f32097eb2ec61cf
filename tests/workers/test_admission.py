"""Requests that a worker's weights and adapters fit: the worker rejects other requests or leaves them in the queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas.errors import ErrorCode, InvalidRequest, RequestRejected
from rollbus.schemas.presence import Capabilities
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.requests.admission import (
    ADAPTER_S,
    MAX_TOO_NEW_S,
    WEIGHTS_ARE_COMING_S,
    Versions,
    check_lag,
    check_request,
    wait_for_weights_s,
)

CAPABILITIES = Capabilities(
    engine="synthetic", engine_version="1", max_model_len=64, vocab_size=100, max_num_seqs=1, max_logprobs=5, dtype="f"
)


def request(
    *, min_weight_version: int | None = None, max_weight_lag: int | None = None, lora: str | None = None
) -> GenerateRequest:
    """Return a request with only these requirements."""
    return GenerateRequest(
        prompt_token_ids=[1], min_weight_version=min_weight_version, max_weight_lag=max_weight_lag, lora=lora
    )


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 10_000))
def test_a_request_starts_only_with_its_version_or_a_later_version(
    wanted: int, have: int, target: int, num_delivered: int
) -> None:
    """With the version or a later one, a request starts. Otherwise the queue delivers it again within half a minute."""
    wait_s = wait_for_weights_s(request(min_weight_version=wanted), Versions(have, target), num_delivered)

    assert (wait_s == 0.0) == (have >= wanted)
    assert wait_s <= MAX_TOO_NEW_S


def test_a_request_waits_briefly_for_expected_weights_and_longer_for_others() -> None:
    """If the worker will get the weights, a request waits a quarter of a second per delivery.

    Otherwise it waits one second, and then twice as long each time, up to four seconds.
    """
    wanted = request(min_weight_version=5)

    assert wait_for_weights_s(wanted, Versions(4, 5), 100) == WEIGHTS_ARE_COMING_S
    assert [wait_for_weights_s(wanted, Versions(4, 4), count) for count in (1, 2, 3, 6, 99)] == [1, 2, 4, 4, 4]
    assert wait_for_weights_s(request(), Versions(4, 5), 1) == 0


@pytest.mark.proves("P81")
@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_a_request_is_too_stale_if_the_target_version_rose_by_more_than_its_lag(
    lag: int, submitted: int, target: int, attempt: int
) -> None:
    """A request is too stale if the target version has risen by more than its lag since its submission."""
    waited, versions = request(max_weight_lag=lag), Versions(0, target)
    if target - submitted <= lag:
        check_lag(waited, attempt=attempt, submitted_target=submitted, versions=versions)
        return
    with pytest.raises(RequestRejected, match=f"from version {submitted} to {target} .* max_weight_lag={lag}") as e:
        check_lag(waited, attempt=attempt, submitted_target=submitted, versions=versions)
    assert (e.value.code, e.value.retryable) == (ErrorCode.TOO_STALE, False)


def test_a_request_with_a_lag_needs_a_target_version_at_submission() -> None:
    """A message with `max_weight_lag` but without the target version at its submission is an invalid request."""
    with pytest.raises(InvalidRequest, match="max_weight_lag is 2 in a message without target_version"):
        check_lag(request(max_weight_lag=2), attempt=0, submitted_target=None, versions=Versions(0, 0))
    check_lag(request(), attempt=0, submitted_target=None, versions=Versions(0, 99))


def test_a_later_attempt_is_never_too_stale() -> None:
    """A later attempt carries no target version of its submission, and continues with any weights."""
    check_lag(request(max_weight_lag=0), attempt=1, submitted_target=None, versions=Versions(0, 99))


def test_a_request_with_an_adapter_that_is_not_loaded_is_rejected() -> None:
    """A request with an adapter that is not loaded is rejected with the names of the loaded adapters."""
    versions = Versions(0, 0, {"b": 1, "a": 7})
    check_request(request(lora="a"), CAPABILITIES, versions)
    with pytest.raises(RequestRejected, match=r"lora 'c' is not loaded on this worker; loaded: a, b$") as e:
        check_request(request(lora="c"), CAPABILITIES, versions)
    assert e.value.code is ErrorCode.UNSUPPORTED
    with pytest.raises(RequestRejected, match="loaded: none"):
        check_request(request(lora="c"), CAPABILITIES, Versions(0, 0))


def test_a_request_with_a_desired_adapter_returns_to_the_queue() -> None:
    """If the adapter is desired in the fleet, the queue delivers the request again, with longer and longer waits.

    A request that was sent directly to the worker is rejected as `queue_full`.
    """
    versions = Versions(3, 3, {"a": 1}, frozenset({"a", "b"}))
    waits = [wait_for_weights_s(request(lora="b"), versions, count) for count in (1, 2, 3, 99)]
    assert waits == [0.25, 0.5, 1.0, 8.0]
    with pytest.raises(RequestRejected, match="lora 'b' is desired in the fleet and not loaded on this worker") as e:
        check_request(request(lora="b"), CAPABILITIES, versions)
    assert e.value.code is ErrorCode.QUEUE_FULL
    for name in ("a", "c", None):
        assert wait_for_weights_s(request(lora=name), versions, 1) == 0
    assert wait_for_weights_s(request(lora="b", min_weight_version=4), versions, 2) == 2
    assert wait_for_weights_s(request(lora="a", min_weight_version=4), Versions(3, 4, {"a": 1}), 2) == 0.25


def test_a_direct_request_to_a_worker_with_older_weights_returns_to_the_client() -> None:
    """A request that was sent directly to a worker with older weights returns to its client."""
    check_request(request(min_weight_version=3), CAPABILITIES, Versions(3, 3))
    with pytest.raises(RequestRejected, match="weight version 2 is older than min_weight_version=3") as e:
        check_request(request(min_weight_version=3), CAPABILITIES, Versions(2, 3))
    assert (e.value.code, e.value.retryable) == (ErrorCode.WEIGHTS_TOO_OLD, True)


def test_versions_of_an_adapter_under_the_models_name_count_for_the_model() -> None:
    """A request for the model uses the adapter with its name, from its record on, and compares with its version."""
    versions = Versions(1, 1, {"other": 8}, model="m")
    assert (versions.adapter_of(None), versions.adapter_of("other")) == (None, "other")
    versions.base_adapter_version, versions.desired_loras = 7, frozenset({"m"})
    lora = versions.adapter_of(None)
    assert lora == "m"
    assert wait_for_weights_s(request(lora=lora), versions, 1) == ADAPTER_S
    versions.loras["m"] = 6
    assert wait_for_weights_s(request(lora=lora, min_weight_version=6), versions, 1) == 0
    assert wait_for_weights_s(request(lora=lora, min_weight_version=7), versions, 1) == WEIGHTS_ARE_COMING_S
    assert wait_for_weights_s(request(lora=lora, min_weight_version=8), versions, 1) == 1
    assert wait_for_weights_s(request(lora="other", min_weight_version=2), versions, 1) == 1
    check_lag(request(lora=lora, max_weight_lag=1), attempt=0, submitted_target=5, versions=versions)
    with pytest.raises(RequestRejected, match="from version 4 to 6"):
        check_lag(request(lora=lora, max_weight_lag=1), attempt=0, submitted_target=4, versions=versions)
    versions.base_adapter_version = None
    assert versions.adapter_of(None) == "m"
    del versions.loras["m"]
    assert versions.adapter_of(None) is None
