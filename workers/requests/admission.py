"""Checks whether this engine can run a request with its current weights. Other requests are rejected or wait."""

import re
from dataclasses import dataclass, field

from ...schemas.errors import ErrorCode, InvalidRequest, RemoteProtocolError, RequestError, RequestRejected
from ...schemas.messages import KvTransfer
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from ...schemas.request_fields import check_prompt, check_sampling

_SUBJECT_TAIL = re.compile(r"[^.*>\x00-\x20\x7f]+(\.[^.*>\x00-\x20\x7f]+)*")
"""One or more tokens of a subject, without wildcards and without characters that end a line of the NATS protocol."""
WEIGHTS_ARE_COMING_S = 0.25
"""Seconds until the queue redelivers a request that needs the desired weights, because a worker will soon have them."""
MAX_TOO_NEW_S = 4.0
"""Maximum seconds until the queue redelivers a request that needs weights which this worker does not know. The value
limits how long the request waits after these weights exist. With it, a thousand waiting requests cost a fleet 2% of one
core."""
MAX_DOUBLINGS = 5
"""Enough doublings to get from one second to more than `MAX_TOO_NEW_S`."""
ADAPTER_S = 0.25
"""Seconds until the first redelivery of a request whose adapter this worker lacks. Usually another worker has it."""
MAX_SHOWN_LORAS = 8
"""Maximum names in an error message: enough to find a misspelt name."""


@dataclass(slots=True)
class Versions:
    """The current versions, which the worker attaches to each engine step."""

    weight_version: int
    """Version of the weights that the engine samples from."""
    target_version: int
    """Version of the desired weights."""
    loras: dict[str, int] = field(default_factory=dict)
    """Version of each loaded adapter, by its name in requests."""
    desired_loras: frozenset[str] = frozenset()
    """Names of the desired adapters of the model. Another worker may have an adapter that this worker lacks."""
    model: str = ""
    """Name of the model. An adapter of this name answers the requests for the model."""
    base_adapter_version: int | None = None
    """Desired version of the adapter with the model's name on this worker; None: none is desired."""

    def adapter_of(self, lora: str | None) -> str | None:
        """Return the adapter that a request with this `lora` uses."""
        has_adapter = self.base_adapter_version is not None or self.model in self.loras
        return self.model if lora is None and has_adapter else lora

    def served(self, lora: str | None) -> int:
        """Return the version with which `min_weight_version` and `max_weight_lag` compare, for the adapter in use."""
        return self.loras.get(self.model, self.weight_version) if lora == self.model else self.weight_version

    def target(self, lora: str | None) -> int:
        """Return the desired value of `served`."""
        return (self.base_adapter_version or 0) if lora == self.model else self.target_version


def check_reply_to(reply_to: str, prefix: str) -> None:
    """Check that `reply_to` is a subject below `prefix`: frames must not reach the subjects of other clients.

    Raises:
        RemoteProtocolError: `reply_to` is not a subject below `prefix`.
    """
    if not reply_to.startswith(prefix) or _SUBJECT_TAIL.fullmatch(reply_to.removeprefix(prefix)) is None:
        raise RemoteProtocolError(f"reply_to is not a subject below {prefix}")


def check_request(request: GenerateRequest, capabilities: Capabilities, versions: Versions) -> None:
    """Check that this engine supports the request and that its weights are acceptable.

    Raises:
        InvalidRequest: a value is wrong for this model. The error names the field and the allowed range.
        RequestRejected: the engine lacks a feature, the adapter is not loaded, or the weights are older than
            `min_weight_version`.
    """
    try:
        check_prompt(request, capabilities)
        if request.sampling.n != 1:
            what = f"is {request.sampling.n}"
            raise InvalidRequest("sampling.n", what, "1: a client sends one message for each sample")
        check_sampling(request.sampling, capabilities)
        _check_offers(request, capabilities, versions)
    except RequestRejected as exc:
        exc.request_id = request.request_id
        raise


def wait_for_weights_s(request: GenerateRequest, versions: Versions, num_delivered: int) -> float:
    """Return the seconds after which the queue should redeliver this request, or 0 if this worker can run it.

    A request waits for later weights, or for an adapter that this worker lacks and another worker may have.

    Args:
        num_delivered: number of deliveries by the queue, at least 1. The wait grows with it.
    """
    wanted = request.min_weight_version
    if wanted is None and request.lora is None:
        return 0.0
    factor, served = 2.0 ** min(num_delivered - 1, MAX_DOUBLINGS), versions.served(request.lora)
    if wanted is not None and wanted > versions.target(request.lora) and wanted > served:
        return min(MAX_TOO_NEW_S, factor)
    if _is_with_others(request, versions):
        return ADAPTER_S * factor
    return WEIGHTS_ARE_COMING_S if wanted is not None and wanted > served else 0.0


def check_lag(request: GenerateRequest, *, attempt: int, submitted_target: int | None, versions: Versions) -> None:
    """Check that the target version has not moved too far while the request waited.

    Args:
        attempt: attempt number in the message.
        submitted_target: target version at the time of submission, from the message. It is None in later attempts,
            because a request that has started is not dropped.

    Raises:
        InvalidRequest: `max_weight_lag` is set, and the message has no `target_version` to count from.
        RequestRejected: the target version has grown by more than `max_weight_lag`.
    """
    if request.max_weight_lag is None or (submitted_target is None and attempt > 0):
        return
    if submitted_target is None:
        raise InvalidRequest(
            "max_weight_lag",
            f"is {request.max_weight_lag} in a message without target_version, from which the lag counts",
            "only in a message with target_version",
        )
    # Clients know the loaded version of an adapter, and not the desired one.
    is_adapter = request.lora == versions.model
    target = versions.served(request.lora) if is_adapter else versions.target_version
    lag = target - submitted_target
    if lag > request.max_weight_lag:
        raise RequestRejected(
            code=ErrorCode.TOO_STALE,
            message=f"the target grew from version {submitted_target} to {target} during the wait, "
            f"by more than max_weight_lag={request.max_weight_lag}",
            request_id=request.request_id,
        )


def check_row_size(request: GenerateRequest, capabilities: Capabilities, max_bytes: int) -> None:
    """Check that one row of routed experts fits a message of this NATS server.

    Raises:
        RequestRejected: rows would be returned, and one row is larger than `max_bytes`.
    """
    routing = capabilities.routed_experts
    if routing is None or request.return_routed_experts is False or routing.row_bytes <= max_bytes:
        return
    raise RequestRejected(
        code=ErrorCode.TOO_LARGE,
        message=f"a row of this model's routed experts has {routing.row_bytes} bytes, and the NATS server's "
        f"max_payload allows {max_bytes}: raise max_payload, or set return_routed_experts=False",
        request_id=request.request_id,
    )


def check_mask_size(request: GenerateRequest, capabilities: Capabilities, max_bytes: int) -> None:
    """Check that one sampling mask fits a message of this NATS server.

    Raises:
        RequestRejected: masks would be returned, and `top_k` ids take more than `max_bytes`.
    """
    if not capabilities.sampling_mask or request.return_sampling_mask is False:
        return
    top_k = request.sampling.top_k
    num_ids = min(top_k, capabilities.vocab_size) if top_k > 0 else capabilities.vocab_size
    if 4 * num_ids <= max_bytes:
        return
    raise RequestRejected(
        code=ErrorCode.TOO_LARGE,
        message=f"a sampling mask of up to {num_ids} ids has {4 * num_ids} bytes, and a message allows "
        f"{max_bytes}: set sampling.top_k to at most {max_bytes // 4}, or return_sampling_mask=False",
        request_id=request.request_id,
    )


def check_phase(request: GenerateRequest, kv: KvTransfer | None, capabilities: Capabilities) -> None:
    """Check that the phase of the request fits the role of this worker.

    Raises:
        InvalidRequest: a prefill phase asks for more than one token.
        RequestRejected: the worker has another role.
    """
    is_prefill = kv is not None and kv.is_prefill
    if is_prefill != (capabilities.role == "prefill"):
        problem = "it accepts only prefill phases" if not is_prefill else "it accepts no prefill phases"
        raise RequestRejected(
            code=ErrorCode.UNSUPPORTED,
            message=f"this worker's role is {capabilities.role}: {problem}, which have `kv` without params",
            request_id=request.request_id,
        )
    if is_prefill and request.sampling.max_tokens != 1:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"is {request.sampling.max_tokens}",
            "1 in a prefill phase",
            request_id=request.request_id,
        )


def can_use(kv: KvTransfer, request: GenerateRequest, capabilities: Capabilities, versions: Versions) -> bool:
    """Return True if the engine may use `kv`: it requests KV, or its KV was computed with the current weights."""
    if kv.is_prefill:
        return True
    lora_version = None if request.lora is None else versions.loras.get(request.lora)
    is_readable = kv.connector is not None and kv.connector == capabilities.kv_connector
    return is_readable and (kv.weight_version, kv.lora_version) == (versions.weight_version, lora_version)


def _check_offers(request: GenerateRequest, capabilities: Capabilities, versions: Versions) -> None:
    if request.return_routed_experts and capabilities.routed_experts is None:
        raise RequestRejected(
            code=ErrorCode.UNSUPPORTED,
            message="return_routed_experts is true, and "
            + (capabilities.routing_refusal or "this model has no routed experts to return"),
        )
    if request.return_sampling_mask and not capabilities.sampling_mask:
        raise RequestRejected(
            code=ErrorCode.UNSUPPORTED,
            message="return_sampling_mask is true, and this worker's engine returns no sampling masks",
        )
    if request.lora is not None and _is_with_others(request, versions):
        # The same answer as from a worker without a free slot: the client then puts the request into the queue.
        raise RequestRejected(
            code=ErrorCode.QUEUE_FULL,
            message=f"lora {request.lora!r} is desired in the fleet and not loaded on this worker",
        )
    if request.lora is not None and request.lora not in versions.loras:
        loaded = sorted(versions.loras)[:MAX_SHOWN_LORAS]
        raise RequestRejected(
            code=ErrorCode.UNSUPPORTED,
            message=f"lora {request.lora!r} is not loaded on this worker; loaded: {', '.join(loaded) or 'none'}",
        )
    wanted = request.min_weight_version
    if wanted is not None and (served := versions.served(request.lora)) < wanted:
        raise RequestRejected(
            code=ErrorCode.WEIGHTS_TOO_OLD,
            message=f"weight version {served} is older than min_weight_version={wanted}",
        )


def _is_with_others(request: GenerateRequest, versions: Versions) -> bool:
    """Return True if this worker lacks the adapter of the request and other workers should have it."""
    return request.lora is not None and request.lora not in versions.loras and request.lora in versions.desired_loras


def not_for_kv(error: RequestError, kv: KvTransfer | None) -> RequestError:
    """Return the error of a request that the engine rejected. If the request had KV, a retry without KV can succeed."""
    if kv is None or kv.is_prefill:
        return error
    return RequestError(
        code=ErrorCode.KV_TRANSFER_FAILED, message=f"the engine rejected the request with its KV: {error.message}"
    )
