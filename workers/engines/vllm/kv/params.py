"""From a `KvTransfer` to the `kv_transfer_params` of vLLM's connectors, and back."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .....schemas.errors import InvalidRequest
from .....schemas.limits import MAX_KV_PARAMS_BYTES
from .....schemas.messages import KvTransfer
from .....schemas.request import GenerateRequest
from .....schemas.wire_version import MALFORMED

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

__all__ = ["EXTRA_ARG", "PREFILL_PARAMS", "TAKES_KV", "decode_params", "encode_params", "is_decode_phase"]

logger = logging.getLogger(__name__)

EXTRA_ARG = "kv_transfer_params"
"""Where vLLM looks for them among a request's `extra_args` (v1/request.py: Request.__init__)."""
TAKES_KV = "do_remote_prefill"
"""Among them: what vLLM and its connectors call a decode phase."""
PREFILL_PARAMS = {
    "do_remote_decode": True,
    TAKES_KV: False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill phase gets, with every connector: the words of vLLM's own proxies."""


def decode_params(kv: KvTransfer | None, request: GenerateRequest, config: Any) -> dict[str, Any] | None:
    """The parameters for an engine with this `KVTransferConfig`, or None; None: a whole request, or KV of no use to it.

    Raises:
        InvalidRequest: the handover cannot be read, or the request wants rows that nobody here knows.
    """
    if kv is None or config is None:
        return None
    if kv.is_prefill:
        return dict(PREFILL_PARAMS) if config.is_kv_producer else None
    if not config.is_kv_consumer:
        return None
    if request.routed_experts_prompt_start < request.prompt_len - 1 and request.return_routed_experts is not False:
        raise InvalidRequest(
            field="routed_experts_prompt_start",
            problem=f"is {request.routed_experts_prompt_start} with KV that was computed elsewhere",
            allowed=f"{request.prompt_len - 1} or more: the rows before are where the KV comes from",
        )
    try:
        return msgspec.msgpack.decode(kv.params, type=dict[str, Any])
    except MALFORMED as exc:
        raise InvalidRequest(field="kv.params", problem=f"cannot be read: {exc}", allowed="a msgpack map") from exc


def encode_params(params: Mapping[str, Any] | None) -> bytes | None:
    """What a prefill phase's end says; None: nothing that can be said, so that the prompt is computed once more."""
    if params is None:
        return None
    try:
        data = msgspec.msgpack.encode(dict(params))
    except (TypeError, ValueError):
        logger.exception("kv.params_encode_failed names=%s", sorted(params))
        return None
    if len(data) > MAX_KV_PARAMS_BYTES:
        logger.error("kv.params_rejected bytes=%d allowed=%d", len(data), MAX_KV_PARAMS_BYTES)
        return None
    return data


def is_decode_phase(params: "VllmSamplingParams") -> bool:
    """A request with these parameters may take its prompt's KV from elsewhere."""
    handover = (getattr(params, "extra_args", None) or {}).get(EXTRA_ARG) or {}
    return bool(handover.get(TAKES_KV))
