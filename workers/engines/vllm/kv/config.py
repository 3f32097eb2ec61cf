"""Selects the KV connector of an engine for its role, and converts a `KvTransfer` to that connector's parameters."""

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .....schemas.decoding import MALFORMED
from .....schemas.errors import InvalidRequest
from .....schemas.limits import MAX_KV_PARAMS_BYTES
from .....schemas.messages import KvTransfer
from .....schemas.presence import WorkerRole
from .....schemas.request import GenerateRequest

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

logger = logging.getLogger(__name__)


FIELD = "kv_transfer_config"
EXAMPLE = "ExampleConnector"
SHARED_FOLDER = "SharedFolderConnector"
SHARED_FOLDER_MODULE = "rollbus.workers.engines.vllm.kv.connector"
STORAGE = "shared_storage_path"
TTL = "abandoned_after_s"
ABANDONED_AFTER_S = 480
"""Default age in seconds after which KV is deleted. Workers pull decode phases first, so these start within seconds. If
the fleet is paused for longer in between, workers compute the prompt again."""
MAX_FOLDER_CHARS = 128
"""Maximum length of the path of the shared folder, which is part of a worker's presence."""
MAX_TTL_S = 24 * 3600

KV_ROLES: dict[str, tuple[str, ...]] = {
    "both": ("kv_both",),
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
}
"""For each worker role, the allowed values of vLLM's `kv_role`; the first value is the default."""

TRANSFERS = frozenset(
    {
        SHARED_FOLDER,
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""vLLM's connectors that transfer KV only for requests whose `kv_transfer_params` request it."""
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


def connector_config(role: WorkerRole, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of vLLM's `KVTransferConfig` for a worker of `role`; None: no connector.

    vLLM's own `ExampleConnector` is replaced by `connector.SharedFolderConnector`, which uses the same folder.

    Raises:
        InvalidRequest: the role needs a connector and has none, or the connector contradicts the role or is invalid.
    """
    if role not in KV_ROLES:
        raise InvalidRequest("role", f"is {role!r}", ", ".join(KV_ROLES))
    if given is None:
        if role != "both":
            raise InvalidRequest(
                FIELD,
                f"is missing for the role {role}",
                "vLLM's KVTransferConfig as JSON, such as "
                f'{{"kv_connector": "{EXAMPLE}", "kv_connector_extra_config": {{"{STORAGE}": "/dev/shm/kv"}}}}',
            )
        return None
    config = dict(given)
    name = config.get("kv_connector")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{FIELD}.kv_connector", f"is {name!r}", "the name of a connector")
    if config.get("kv_role") is None:
        config["kv_role"] = KV_ROLES[role][0]
    if config["kv_role"] not in KV_ROLES[role]:
        raise InvalidRequest(
            f"{FIELD}.kv_role", f"is {config['kv_role']!r} for the role {role}", " or ".join(KV_ROLES[role])
        )
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise InvalidRequest(f"{FIELD}.kv_connector_extra_config", "is not a map", "a JSON object")
    if name == EXAMPLE and not config.get("kv_connector_module_path"):
        folder = extra.get(STORAGE)
        if not isinstance(folder, str) or not Path(folder).is_absolute() or len(folder) > MAX_FOLDER_CHARS:
            raise InvalidRequest(
                f"{FIELD}.kv_connector_extra_config.{STORAGE}",
                f"is {folder!r}",
                "the absolute path of a folder that prefill and decode workers share, of at most "
                f"{MAX_FOLDER_CHARS} characters",
            )
        ttl_s = extra.get(TTL, ABANDONED_AFTER_S)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 1 <= ttl_s <= MAX_TTL_S:
            raise InvalidRequest(
                f"{FIELD}.kv_connector_extra_config.{TTL}",
                f"is {ttl_s!r}",
                f"1 to {MAX_TTL_S} seconds; default: {ABANDONED_AFTER_S}",
            )
        config |= {
            "kv_connector": SHARED_FOLDER,
            "kv_connector_module_path": SHARED_FOLDER_MODULE,
            "kv_connector_extra_config": {**extra, TTL: ttl_s},
        }
    return config


def connector_names(config: Any) -> list[str]:
    """Return the connectors in vLLM's `KVTransferConfig`: one, or the connectors inside a `MultiConnector`."""
    if config.kv_connector != "MultiConnector":
        return [str(config.kv_connector)]
    children = config.kv_connector_extra_config.get("connectors") or [{}]
    return [str(child.get("kv_connector")) for child in children]


def describe_connector(config: Any) -> str | None:
    """Return the values that must be equal on a prefill and a decode worker, from vLLM's `VllmConfig`.

    None: the configuration has no connector.
    """
    import vllm

    transfer, model = config.kv_transfer_config, config.model_config
    if transfer is None or transfer.kv_connector is None:
        return None
    parts = [*connector_names(transfer), f"vllm-{vllm.__version__}"]
    if transfer.kv_connector == SHARED_FOLDER:
        # The files contain the blocks of the cache without conversion, so both caches must have the same layout.
        parallel = config.parallel_config
        parts[0] = f"{EXAMPLE} {transfer.kv_connector_extra_config[STORAGE]}"
        parts += [
            f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}",
            f"{config.device_config.device_type}-{platform.machine()}",
            f"block-{config.cache_config.block_size}",
        ]
    return " ".join([*parts, str(model.dtype).removeprefix("torch."), f"kv-{config.cache_config.cache_dtype}"])


def connector_refusal(config: Any) -> str | None:
    """Return why the connectors of this `KVTransferConfig` prevent routed experts; None: they are compatible.

    If this engine did not compute the KV of a prompt token, its experts are unknown, and vLLM returns a row that
    another request left. Prefill and decode phases never request these rows. With a connector that finds KV by itself,
    any prompt may get them. The user's own connectors are not checked.
    """
    if config is None or config.kv_connector is None:
        return None
    if config.kv_connector != "MultiConnector" and config.kv_connector_module_path:
        return None
    stores = [name for name in connector_names(config) if name not in TRANSFERS]
    if not stores:
        return None
    allowed = ", ".join(sorted(TRANSFERS - {SHARED_FOLDER} | {EXAMPLE}))
    return (
        f"{', '.join(stores)} loads KV of earlier prompts by itself, and the experts are unknown for prompt tokens "
        f"whose KV this engine did not compute; allowed with routed experts: {allowed} alone, or the engine argument "
        "'enable_return_routed_experts': false"
    )


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
            "routed_experts_prompt_start",
            f"is {request.routed_experts_prompt_start} in a request whose KV another worker computed",
            f"{request.prompt_len - 1} or more: only the worker that computed the KV has the earlier rows",
        )
    try:
        return msgspec.msgpack.decode(kv.params, type=dict[str, Any])
    except MALFORMED as exc:
        raise InvalidRequest("kv.params", f"cannot be decoded: {exc}", "a msgpack map") from exc


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
