import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollbus.schemas.errors import EngineDead, InvalidRequest
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm import plugin
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.extension import WorkerExtension, extension_name, is_ours
from rollbus.workers.engines.vllm.kv.config import PREFILL_PARAMS, connector_config, decode_params, encode_params
from rollbus.workers.engines.vllm.kv.connector import KvBlocks
from rollbus.workers.engines.vllm.kv.files import BlockTransfer, KvFolder, Sweeper, new_kv_id
from rollbus.workers.engines.vllm.launch import engine_arguments, set_environment
from rollbus.workers.engines.vllm.params import to_vllm

pytestmark = pytest.mark.vllm

EXAMPLE = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}
NIXL = {"kv_connector": "NixlConnector"}
SMALL = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}


class Transfer:
    """The fields of vLLM's `KVTransferConfig` that the adapter reads."""

    def __init__(self, *, is_kv_producer: bool = True, is_kv_consumer: bool = True) -> None:
        self.is_kv_producer = is_kv_producer
        self.is_kv_consumer = is_kv_consumer


def test_a_worker_of_both_roles_needs_no_connector() -> None:
    """A worker that runs both phases needs no connector."""
    assert connector_config("both", None) is None


@pytest.mark.parametrize(
    ("role", "given", "kv_role"),
    [
        ("both", NIXL, "kv_both"),
        ("prefill", NIXL, "kv_producer"),
        ("decode", NIXL, "kv_consumer"),
        ("decode", {**NIXL, "kv_role": "kv_both", "kv_ip": "10.0.0.1"}, "kv_both"),
    ],
)
def test_the_role_of_the_worker_sets_the_role_in_vllm(role: Any, given: dict[str, Any], kv_role: str) -> None:
    """The worker's role sets the role in vLLM, unless the user sets it. All other settings are passed on unchanged."""
    assert connector_config(role, given) == {**given, "kv_role": kv_role}


def test_the_example_connector_is_replaced() -> None:
    """The worker replaces vLLM's example connector, which would load KV of other weights, and keeps its folder."""
    config = connector_config("prefill", EXAMPLE)

    assert config["kv_connector"] == "SharedFolderConnector"
    assert config["kv_connector_module_path"] == "rollbus.workers.engines.vllm.kv.connector"
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/kv", "abandoned_after_s": 480}


@pytest.mark.parametrize(
    ("role", "given", "message"),
    [
        ("prefill", None, "kv_transfer_config is missing for the role prefill; allowed: vLLM's KVTransferConfig"),
        ("middle", NIXL, "role is 'middle'; allowed: both, prefill, decode"),
        ("both", {}, "kv_transfer_config.kv_connector is None"),
        (
            "prefill",
            {**NIXL, "kv_role": "kv_consumer"},
            "kv_role is 'kv_consumer' for the role prefill; allowed: kv_pr",
        ),
        ("decode", {**NIXL, "kv_role": "kv_producer"}, "allowed: kv_consumer or kv_both"),
        ("both", {**NIXL, "kv_role": "kv_producer"}, "for the role both; allowed: kv_both"),
        ("decode", {**NIXL, "kv_connector_extra_config": 1}, "kv_connector_extra_config is not a map"),
        ("decode", {"kv_connector": "ExampleConnector"}, "shared_storage_path is None; allowed: the absolute path"),
        (
            "decode",
            {**EXAMPLE, "kv_connector_extra_config": {"shared_storage_path": "kv"}},
            "shared_storage_path is 'kv'; allowed: the absolute path",
        ),
        (
            "decode",
            {**EXAMPLE, "kv_connector_extra_config": {"shared_storage_path": "/kv", "abandoned_after_s": 0}},
            "abandoned_after_s is 0; allowed: 1 to 86400 seconds",
        ),
    ],
)
def test_a_role_and_a_connector_that_contradict_each_other_are_rejected(
    role: Any, given: dict[str, Any] | None, message: str
) -> None:
    """If role and connector contradict each other, an error names the conflict before any process starts."""
    with pytest.raises(InvalidRequest) as refused:
        VllmEngine("/model", engine_args={} if given is None else {"kv_transfer_config": given}, role=role)
    assert message in str(refused.value)


def request(prompt_len: int, start: int = 0, **fields: Any) -> GenerateRequest:
    """Return a request with a prompt of this length."""
    return GenerateRequest(prompt_token_ids=[5] * prompt_len, routed_experts_prompt_start=start, **fields)


def test_a_kv_transfer_becomes_the_parameters_of_vllm() -> None:
    """A prefill phase gets the parameters of vLLM's proxies. A decode phase gets those of the connector unchanged."""
    said = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h", "remote_port": 5600}

    assert decode_params(None, request(40), Transfer()) is None
    assert decode_params(KvTransfer(), request(40), Transfer()) == PREFILL_PARAMS
    data = encode_params(said)
    assert data is not None
    assert decode_params(KvTransfer(params=data), request(41, 40), Transfer()) == said


def test_an_engine_without_a_suitable_connector_runs_whole_requests() -> None:
    """An engine without a connector, or with one for the other direction, runs each phase as a whole request."""
    leg = KvTransfer(params=msgspec.msgpack.encode({}))

    assert decode_params(KvTransfer(), request(40), None) is None
    assert decode_params(leg, request(41, 40), None) is None
    assert decode_params(KvTransfer(), request(40), Transfer(is_kv_producer=False)) is None
    assert decode_params(leg, request(41, 40), Transfer(is_kv_consumer=False)) is None


def test_a_decode_phase_returns_no_rows_of_another_workers_tokens() -> None:
    """A decode phase cannot return rows of tokens that another worker computed."""
    leg = KvTransfer(params=msgspec.msgpack.encode({}))

    with pytest.raises(InvalidRequest, match=r"routed_experts_prompt_start is 39 .*; allowed: 40 or more"):
        decode_params(leg, request(41, 39), Transfer())
    assert decode_params(leg, request(41, 0, return_routed_experts=False), Transfer()) == {}


def test_kv_transfer_parameters_that_are_no_plain_map_do_not_reach_vllm() -> None:
    """Parameters whose bytes are no map are rejected, and maps with other than plain values are not passed on."""
    with pytest.raises(InvalidRequest, match=r"kv\.params cannot be decoded"):
        decode_params(KvTransfer(params=b"\x01"), request(41, 40), Transfer())
    assert encode_params(None) is None
    assert encode_params({"remote_block_ids": object()}) is None
    assert encode_params({"remote_block_ids": [2**31] * 100_000}) is None


def test_the_name_of_the_extension_identifies_the_engine_of_a_rollbus_worker() -> None:
    """The name of the extension identifies the engine of a rollbus worker, also with the user's own extension."""
    assert is_ours(extension_name(None))
    assert is_ours(extension_name("some.where.Else"))
    assert not is_ours("some.where.Else")
    assert not is_ours(f"{WorkerExtension.__module__}.Other")
    assert not is_ours(None)


@pytest.fixture
def vllm_here() -> None:
    """Prepare this process for an import of vLLM."""
    set_environment("", None)
    plugin.install()


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_here")
class TestWithVllm:
    """Tests that need vLLM's own configuration, but no engine."""

    def config(self, model: Path, **given: Any) -> Any:
        """Return the configuration with which an engine would start."""
        return engine_arguments(str(model), {**SMALL, **given}).create_engine_config()

    @pytest.mark.routing
    def test_routed_experts_work_with_a_connector(self, tiny_moe_float32: Path) -> None:
        """Routed experts work with a connector, also when the engine core checks its configuration again."""
        config = self.config(tiny_moe_float32, kv_transfer_config=connector_config("prefill", EXAMPLE))
        config.__post_init__()

        assert config.model_config.enable_return_routed_experts
        assert config.kv_transfer_config.is_kv_producer

    @pytest.mark.routing
    def test_a_vllm_outside_of_rollbus_still_rejects_a_connector_with_routing(self, tiny_moe_float32: Path) -> None:
        """A vLLM outside of a rollbus worker still rejects a connector with routing.

        That vLLM would not drop stale rows.
        """
        config = self.config(tiny_moe_float32, kv_transfer_config=connector_config("prefill", EXAMPLE))
        config.parallel_config.worker_extension_cls = ""

        with pytest.raises(ValueError, match="incompatible with KV connectors"):
            config.__post_init__()
        assert config.model_config.enable_return_routed_experts

    @pytest.mark.routing
    def test_other_rejections_of_vllm_still_apply(self, tiny_moe_float32: Path) -> None:
        """Only this rejection is lifted: vLLM still rejects pipelines, and offloading that is configured later."""
        config = self.config(tiny_moe_float32, kv_transfer_config=connector_config("prefill", EXAMPLE))
        config.parallel_config.pipeline_parallel_size = 2
        with pytest.raises(ValueError, match="incompatible with pipeline parallelism"):
            config.__post_init__()
        config.parallel_config.pipeline_parallel_size = 1
        config.kv_transfer_config.kv_connector = "OffloadingConnector"
        config.kv_transfer_config.kv_connector_module_path = None
        with pytest.raises(ValueError, match="incompatible with KV connectors"):
            config.__post_init__()

    @pytest.mark.routing
    def test_the_engine_does_not_start_if_the_patch_would_hide_the_flag_elsewhere(
        self, tiny_moe_float32: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine does not start if the patch would hide the flag from more than this check."""
        given = engine_arguments(
            str(tiny_moe_float32), {**SMALL, "kv_transfer_config": connector_config("prefill", EXAMPLE)}
        )
        monkeypatch.setattr(plugin, "FLAG", "self.model_config")
        with pytest.raises(Exception, match=r"does not read self\.model_config exactly once"):
            given.create_engine_config()

    @pytest.mark.routing
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"kv_connector": "OffloadingConnector"},
                "OffloadingConnector loads KV of earlier prompts by itself, .* allowed with",
            ),
            ({"kv_connector": "SimpleCPUOffloadConnector"}, "SimpleCPUOffloadConnector loads KV of earlier prompts"),
            ({"kv_connector": "LMCacheConnectorV1"}, "LMCacheConnectorV1 loads KV of earlier prompts"),
            (
                {
                    "kv_connector": "MultiConnector",
                    "kv_connector_extra_config": {"connectors": [NIXL, {"kv_connector": "OffloadingConnector"}]},
                },
                "OffloadingConnector loads KV of earlier prompts",
            ),
            (
                {**NIXL, "kv_conector": 1},
                r"'kv_transfer_config.kv_conector' is unknown.*\(did you mean kv_connector\?\)",
            ),
            (
                {**NIXL, "kv_load_failure_policy": "hope"},
                "'kv_transfer_config' is rejected by vLLM: kv_load_failure_policy: .*recompute",
            ),
        ],
    )
    def test_an_offloading_connector_with_routing_and_unknown_settings_are_rejected(
        self, tiny_moe_float32: Path, given: dict[str, Any], message: str
    ) -> None:
        """An offloading connector is rejected together with routing, and an unknown connector setting by its name."""
        with pytest.raises(EngineDead, match=message):
            engine_arguments(str(tiny_moe_float32), {**SMALL, "kv_transfer_config": connector_config("both", given)})

    @pytest.mark.routing
    def test_an_argument_that_later_becomes_a_connector_is_rejected(self, tiny_moe_float32: Path) -> None:
        """An argument that becomes a connector only after vLLM's own check is rejected.

        Without routing, nothing is rejected.
        """
        with pytest.raises(EngineDead, match="'kv_offloading_size': vLLM would restore KV"):
            engine_arguments(str(tiny_moe_float32), {**SMALL, "kv_offloading_size": 1.0})
        offload = connector_config("both", {"kv_connector": "OffloadingConnector"})
        without = {"enable_return_routed_experts": False, "kv_transfer_config": offload}
        assert engine_arguments(str(tiny_moe_float32), {**SMALL, **without}).kv_transfer_config is not None

    def test_only_the_bus_sets_the_parameters_of_a_kv_transfer(self) -> None:
        """Only the bus sets the parameters of a KV transfer. The user's other arguments are kept beside them."""
        own = SamplingParams(extra={"extra_args": {"kv_transfer_params": {"remote_host": "elsewhere"}}})
        with pytest.raises(InvalidRequest, match=r"extra_args\.kv_transfer_params is reserved for rollbus"):
            to_vllm(request(40, sampling=own), max_model_len=128, returns_rows=True)
        other = SamplingParams(extra={"extra_args": {"note": 1}})
        params = to_vllm(request(40, sampling=other), max_model_len=128, returns_rows=True, kv=dict(PREFILL_PARAMS))
        assert params.extra_args == {"note": 1, "kv_transfer_params": PREFILL_PARAMS}


NUM_BLOCKS = 8
SHARD = "pp0-tp0"


@pytest.fixture
def folder(tmp_path: Path) -> KvFolder:
    """Return a KV folder whose files are abandoned after a minute."""
    return KvFolder(tmp_path, ttl_s=60)


def caches(seed: int, *, per_block: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the KV caches of two layers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS * per_block, 2, 32 // per_block, 16)
    return {name: torch.rand(shape, generator=generator).to(dtype) for name in ("layers.0", "layers.1")}


def set_age(tmp_path: Path, kv_id: str, age_s: float) -> None:
    """Set the age of a transfer's folder."""
    then = time.time() - age_s
    os.utime(tmp_path / kv_id, (then, then))


@pytest.mark.parametrize("per_block", [1, 4])
def test_loaded_blocks_equal_the_stored_blocks(folder: KvFolder, tmp_path: Path, per_block: int) -> None:
    """The loaded blocks equal the stored ones, in other blocks and from the middle on. The load removes the file."""
    source, target = caches(0, per_block=per_block), caches(1, per_block=per_block)
    untouched = {name: cache.clone() for name, cache in target.items()}
    kv_id = new_kv_id()
    KvBlocks(folder, source, NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[5, 0, 3]))
    assert [file.name for file in (tmp_path / kv_id).iterdir()] == [f"{SHARD}.safetensors"]

    assert KvBlocks(folder, target, NUM_BLOCKS, SHARD).load(BlockTransfer(kv_id=kv_id, block_ids=[2, 7], first_block=1))
    for name, cache in target.items():
        blocks = cache.view(NUM_BLOCKS, -1)
        stored = source[name].view(NUM_BLOCKS, -1)
        expected = untouched[name].view(NUM_BLOCKS, -1)
        expected[2], expected[7] = stored[0], stored[3]
        assert torch.equal(blocks, expected)
    assert list(tmp_path.iterdir()) == []


def test_each_process_of_an_engine_has_its_own_file(folder: KvFolder, tmp_path: Path) -> None:
    """Each process has its own file. The last process removes the transfer's folder. A shared folder may vanish."""
    kv_id = new_kv_id()
    tmp_path.rmdir()
    shards = [(f"pp0-tp{rank}", caches(rank), caches(9)) for rank in range(2)]
    for shard, source, _ in shards:
        KvBlocks(folder, source, NUM_BLOCKS, shard).store(BlockTransfer(kv_id=kv_id, block_ids=[1]))
    for shard, source, target in shards:
        assert (tmp_path / kv_id).is_dir()
        assert KvBlocks(folder, target, NUM_BLOCKS, shard).load(BlockTransfer(kv_id=kv_id, block_ids=[4]))
        assert all(torch.equal(target[name][4], source[name][1]) for name in source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "other layers", "other dtype", "too few blocks", "bad id"])
def test_an_invalid_file_changes_no_block_and_is_removed(folder: KvFolder, tmp_path: Path, damage: str) -> None:
    """A file that is missing, truncated or of another model is not loaded and changes no block. It is then removed."""
    kv_id = new_kv_id()
    source = caches(0, dtype=torch.bfloat16 if damage == "other dtype" else torch.float32)
    if damage == "other layers":
        del source["layers.1"]
    KvBlocks(folder, source, NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[1, 2]))
    file = folder.file(kv_id, SHARD)
    if damage == "missing":
        file.unlink()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:3000])
    target = caches(1)
    wanted = [4, 5, 6] if damage == "too few blocks" else [4, 5]
    job = BlockTransfer(kv_id="../other" if damage == "bad id" else kv_id, block_ids=wanted)

    assert not KvBlocks(folder, target, NUM_BLOCKS, SHARD).load(job)
    assert all(torch.equal(target[name], cache) for name, cache in caches(1).items())
    assert list(tmp_path.glob("*/*.safetensors")) == ([file] if damage == "bad id" else [])


def test_a_failed_store_leaves_no_file(folder: KvFolder, tmp_path: Path) -> None:
    """A failed store leaves no file that a load could accept as KV, and raises no error."""
    kv_id = new_kv_id()
    # A folder blocks the name of the file that is written first.
    (tmp_path / kv_id / f"{SHARD}.tmp").mkdir(parents=True)
    KvBlocks(folder, caches(0), NUM_BLOCKS, SHARD).store(BlockTransfer(kv_id=kv_id, block_ids=[1]))

    assert list(tmp_path.iterdir()) == []


def test_a_cache_without_blocks_is_refused(folder: KvFolder) -> None:
    """If a layer's cache does not consist of blocks, the engine does not start, so nothing is stored wrongly."""
    with pytest.raises(TypeError, match=r"layers\.0 does not consist of 8 blocks"):
        KvBlocks(folder, {"layers.0": [torch.zeros(8), torch.zeros(8)]}, NUM_BLOCKS, SHARD)


def test_the_sweep_deletes_only_old_transfers(folder: KvFolder, tmp_path: Path) -> None:
    """The sweep deletes old transfers. It leaves young transfers and other files."""
    old, young = new_kv_id(), new_kv_id()
    for name in (old, young, "something-else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    set_age(tmp_path, old, 61)
    set_age(tmp_path, "something-else", 10_000)

    assert folder.sweep() == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {young, "something-else"}


def test_the_sweeper_deletes_old_files_in_an_unused_folder(tmp_path: Path) -> None:
    """The sweeper deletes old files without any other use of the folder."""
    kv_id = new_kv_id()
    (tmp_path / kv_id).mkdir()
    set_age(tmp_path, kv_id, 1000)
    sweeper = Sweeper(KvFolder(tmp_path, ttl_s=0.5))
    try:
        while (tmp_path / kv_id).exists():
            time.sleep(0.01)
    finally:
        sweeper.close()
