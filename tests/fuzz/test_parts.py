"""Text and bytes inside decoded messages are validated too: routed experts of canaries, objects and KV parameters."""

import contextlib
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbus.bus.objects.layout import ObjectInfo, decode_digest, decode_info, name_of
from rollbus.bus.protocol.fleet.canary import canary_rows
from rollbus.schemas.decoding import MALFORMED
from rollbus.schemas.errors import ControlError, InvalidRequest, RemoteProtocolError
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.weights import Canary
from rollbus.workers.engines.synthetic.model import SyntheticKv
from rollbus.workers.engines.vllm.kv.config import decode_params
from tests.fuzz.mutations import harmed
from tests.schemas.strategies import TOKEN_ID, texts

pytestmark = pytest.mark.slow

SIZES = st.integers(-1, 5) | st.sampled_from([2**31, 2**62, -(2**63)])


@given(texts | st.binary().map(lambda data: data.decode("latin-1")), st.tuples(SIZES, SIZES, SIZES))
@example("AAé=", (1, 1, 2))
def test_routed_experts_of_a_canary_are_validated(routed_experts: str, shape: tuple[int, int, int]) -> None:
    """`canary_rows` returns rows of the named shape or raises an error with a text.

    The rows never exceed the received bytes.
    """
    canary = Canary(token_ids=(1,), logprobs=(-0.5,), routed_experts=routed_experts, shape=shape)
    try:
        rows = canary_rows(canary)
    except RemoteProtocolError as exc:
        assert str(exc)
    else:
        assert rows.shape == shape
        assert rows.nbytes <= len(routed_experts)


OBJECT = ObjectInfo(name="f", bucket="b", nuid="n", size=9, chunks=1, digest="SHA-256=")


@given(harmed(st.just(msgspec.json.encode(OBJECT))))
@example(b'{"name":"f","bucket":"b","nuid":"n","size":9,"chunks":1,"digest":"SHA-256=\xc3\xa9"}')
def test_an_object_description_is_valid_or_an_error(data: bytes) -> None:
    """An object description is valid, or the error states the reason."""
    try:
        info = decode_info(data)
        decode_digest(info)
    except ControlError as exc:
        assert exc.message


@given(st.text())
@example("$O.b.M.é")
def test_any_subject_has_a_name_or_none(subject: str) -> None:
    """`name_of` returns a name or None for any subject."""
    name = name_of(subject)

    assert name is None or isinstance(name, str)


@given(harmed(st.dictionaries(texts, texts | TOKEN_ID, max_size=3).map(msgspec.msgpack.encode)) | st.binary())
@example(b"\x81\xa1\xff\xc0")
@example(b"\x81\xa1a" + b"\x91" * 100_000)
def test_kv_transfer_parameters_are_validated(params: bytes) -> None:
    """The connector gets KV parameters as a map, or they are rejected. The synthetic engine validates them too."""
    request = GenerateRequest(prompt_token_ids=[1, 2], return_routed_experts=False)
    config = SimpleNamespace(is_kv_consumer=True)
    try:
        assert isinstance(decode_params(KvTransfer(params=params or b"\x80"), request, config), dict)
    except InvalidRequest as exc:
        assert exc.field == "kv.params"
    with contextlib.suppress(*MALFORMED):
        msgspec.msgpack.decode(params, type=SyntheticKv)
