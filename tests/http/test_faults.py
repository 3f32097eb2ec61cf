"""Faults of the caller are answered 4xx with the field's name, also if a worker finds them."""

from pathlib import Path

import pytest

from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.requests import named_errors
from rollbus.schemas.errors import ErrorCode, RequestError
from tests.http.control_support import control_http

NAMES = {"sampling": "", "sampling.extra": "", "sampling.extra.structured_outputs": "response_format"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("sampling.extra.structured_outputs was rejected by vLLM: no grammar; allowed: see", "response_format"),
        ("sampling.allowed_token_ids allows no token that is left; allowed: others", "allowed_token_ids"),
        ("prompt_token_ids[3] is -1; allowed: others", "prompt_token_ids[3]"),
        ("the worker rejects it", None),
    ],
)
def test_an_error_of_a_worker_names_the_field_of_the_route(message: str, param: str | None) -> None:
    """If a worker rejects a field, `error.param` is the route's name of the field and begins the message."""
    with pytest.raises(HttpError) as raised, named_errors(NAMES):
        raise RequestError(code=ErrorCode.INVALID_REQUEST, message=message, request_id="r")
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, "invalid_request")
    assert raised.value.message.startswith(param or message)
    with pytest.raises(HttpError) as raised, named_errors(NAMES):
        raise RequestError(code=ErrorCode.ENGINE_ERROR, message=message, request_id="r")
    assert (raised.value.status, raised.value.param) == (502, None)


async def test_a_command_that_no_worker_can_apply_is_4xx(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A missing folder of weights or of an adapter, and a command that no engine supports, are 400 and not 502.

    For an adapter, vLLM's clients expect 404.
    """
    absent = str(tmp_path / "absent")
    async with control_http(nats_url, fleet, tmp_path) as c:
        folder = str(c.root / "absent")
        found = {
            path: await c.http.client.post(path, json=body)
            for path, body in {
                "/update_weights": {"weight_dir": folder},
                "/v1/rl/update_weights": {"path": folder, "version": 9},
                "/v1/rl/load_lora_adapter": {"name": "b", "path": folder},
                "/v1/load_lora_adapter": {"lora_name": "b", "lora_path": folder},
                "/v1/rl/pause": {"workers": [absent]},
            }.items()
        }
    statuses = {path: answer.status_code for path, answer in found.items()}
    assert statuses == {**dict.fromkeys(found, 400), "/v1/load_lora_adapter": 404}
    codes = {answer.json()["error"]["code"] for path, answer in found.items() if not path.endswith("pause")}
    assert codes == {"bad_source"}
