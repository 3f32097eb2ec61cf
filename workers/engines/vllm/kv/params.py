"""Converts a `KvTransfer` to the `kv_transfer_params` of vLLM's connectors, and back."""

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
"""Key of the KV transfer parameters in a request's `extra_args` (v1/request.py: Request.__init__)."""
TAKES_KV = "do_remote_prefill"
"""Key by which vLLM and its connectors mark a decode phase in the KV transfer parameters."""
PREFILL_PARAMS = {
    "do_remote_decode": True,
    TAKES_KV: False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""KV transfer parameters of a prefill phase for every connector; vLLM's own proxies send the same."""


def decode_params(kv: KvTransfer | None, request: GenerateRequest, config: Any) -> dict[str, Any] | None:
    """Return the KV transfer parameters for an engine with this `KVTransferConfig`.

    None: the request has no separate phases, or the engine cannot produce or use its KV.

    Raises:
        InvalidRequest: `kv.params` cannot be decoded, or the request needs rows that only the prefill worker has.
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
            problem=f"is {request.routed_experts_prompt_start} in a request whose KV another worker computed",
            allowed=f"{request.prompt_len - 1} or more: only the worker that computed the KV has the earlier rows",
        )
    try:
        return msgspec.msgpack.decode(kv.params, type=dict[str, Any])
    except MALFORMED as exc:
        raise InvalidRequest(field="kv.params", problem=f"cannot be decoded: {exc}", allowed="a msgpack map") from exc


def encode_params(params: Mapping[str, Any] | None) -> bytes | None:
    """Return the encoded KV transfer parameters of a prefill phase.

    None: there are no parameters, or they are too large or cannot be encoded; the prompt is then computed again.
    """
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
    """Return True if a request with these parameters may load the KV of its prompt from another worker."""
    handover = (getattr(params, "extra_args", None) or {}).get(EXTRA_ARG) or {}
    return bool(handover.get(TAKES_KV))
