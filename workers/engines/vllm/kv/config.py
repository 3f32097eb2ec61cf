"""Which KV connector an engine gets for its role, and which ones go together with routed experts."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .....schemas.errors import InvalidRequest
from .....schemas.presence import Role

__all__ = [
    "FIELD",
    "STORAGE",
    "TTL",
    "connector_config",
    "connector_names",
    "describe_connector",
    "routing_refusal",
]

FIELD = "kv_transfer_config"
EXAMPLE = "ExampleConnector"
SHARED_FOLDER = "SharedFolderConnector"
SHARED_FOLDER_MODULE = "rollbus.workers.engines.vllm.kv.connector"
STORAGE = "shared_storage_path"
TTL = "abandoned_after_s"
ABANDONED_AFTER_S = 480
"""Decode phases come within seconds, from the front of the queue; a fleet that is paused in between computes again."""
MAX_FOLDER_CHARS = 128
"""It stands in what workers announce."""
MAX_TTL_S = 24 * 3600

KV_ROLES: dict[str, tuple[str, ...]] = {
    "both": ("kv_both",),
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
}
"""vLLM's roles that go with a worker's; the first is what it gets where none is given."""

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
"""vLLM's connectors that touch only requests which say so in their `kv_transfer_params`."""


def connector_config(role: Role, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Fields of vLLM's `KVTransferConfig` for a worker of `role`; None: no connector.

    vLLM's own `ExampleConnector` is replaced by `connector.SharedFolderConnector`, which uses the same folder.

    Raises:
        InvalidRequest: a role without a connector, or with one that contradicts it.
    """
    if role not in KV_ROLES:
        raise InvalidRequest(field="role", problem=f"is {role!r}", allowed=", ".join(KV_ROLES))
    if given is None:
        if role != "both":
            raise InvalidRequest(
                field=FIELD,
                problem=f"is missing for the role {role}",
                allowed="vLLM's KVTransferConfig as JSON, such as "
                f'{{"kv_connector": "{EXAMPLE}", "kv_connector_extra_config": {{"{STORAGE}": "/dev/shm/kv"}}}}',
            )
        return None
    config = dict(given)
    name = config.get("kv_connector")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(field=f"{FIELD}.kv_connector", problem=f"is {name!r}", allowed="the name of a connector")
    if config.get("kv_role") is None:
        config["kv_role"] = KV_ROLES[role][0]
    if config["kv_role"] not in KV_ROLES[role]:
        raise InvalidRequest(
            field=f"{FIELD}.kv_role",
            problem=f"is {config['kv_role']!r} for the role {role}",
            allowed=" or ".join(KV_ROLES[role]),
        )
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise InvalidRequest(field=f"{FIELD}.kv_connector_extra_config", problem="is no map", allowed="a JSON object")
    if name == EXAMPLE and not config.get("kv_connector_module_path"):
        folder = extra.get(STORAGE)
        if not isinstance(folder, str) or not Path(folder).is_absolute() or len(folder) > MAX_FOLDER_CHARS:
            raise InvalidRequest(
                field=f"{FIELD}.kv_connector_extra_config.{STORAGE}",
                problem=f"is {folder!r}",
                allowed="the absolute path of a folder that prefill and decode workers share, of at most "
                f"{MAX_FOLDER_CHARS} characters",
            )
        ttl_s = extra.get(TTL, ABANDONED_AFTER_S)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 1 <= ttl_s <= MAX_TTL_S:
            raise InvalidRequest(
                field=f"{FIELD}.kv_connector_extra_config.{TTL}",
                problem=f"is {ttl_s!r}",
                allowed=f"1 to {MAX_TTL_S} seconds; {ABANDONED_AFTER_S} where it is not given",
            )
        config |= {
            "kv_connector": SHARED_FOLDER,
            "kv_connector_module_path": SHARED_FOLDER_MODULE,
            "kv_connector_extra_config": {**extra, TTL: ttl_s},
        }
    return config


def connector_names(config: Any) -> list[str]:
    """The connectors in a `KVTransferConfig` of vLLM's: one, or those inside of a `MultiConnector`."""
    if config.kv_connector != "MultiConnector":
        return [str(config.kv_connector)]
    children = config.kv_connector_extra_config.get("connectors") or [{}]
    return [str(child.get("kv_connector")) for child in children]


def describe_connector(config: Any) -> str | None:
    """What a prefill and a decode worker must have in common, from vLLM's `VllmConfig`; None: it has no connector."""
    import vllm

    transfer, model = config.kv_transfer_config, config.model_config
    if transfer is None or transfer.kv_connector is None:
        return None
    parts = [*connector_names(transfer), f"vllm-{vllm.__version__}"]
    if transfer.kv_connector == SHARED_FOLDER:
        # Its files are the blocks of the cache as they are.
        parallel = config.parallel_config
        parts[0] = f"{EXAMPLE} {transfer.kv_connector_extra_config[STORAGE]}"
        parts += [
            f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}",
            f"{config.device_config.device_type}-{platform.machine()}",
            f"block-{config.cache_config.block_size}",
        ]
    return " ".join([*parts, str(model.dtype).removeprefix("torch."), f"kv-{config.cache_config.cache_dtype}"])


def routing_refusal(config: Any) -> str | None:
    """Why routed experts cannot be returned with the connectors of this `KVTransferConfig`; None: they can.

    If the KV of a prompt was not computed here, its experts are unknown: vLLM returns rows that another request has
    left. Prefill and decode phases ask for no such rows. With a connector that finds KV by itself, any prompt may have
    them. A connector of the user's own is not checked.
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
        f"{', '.join(stores)} brings back KV on its own account, and of prompt tokens whose KV was not computed here "
        f"the experts are unknown; allowed with routed experts: {allowed} by itself, or the engine argument "
        "'enable_return_routed_experts': false"
    )
