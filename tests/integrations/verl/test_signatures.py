"""The members of the released verl on which the adapter depends are those for which it was written."""

from pathlib import Path
from typing import Final

from tests.integrations.support import find_python, needs, run_program

PROGRAM = Path(__file__).parent / "programs" / "signatures.py"
REPLICA: Final = "verl.workers.rollout.replica:RolloutReplica"
ROLLOUT: Final = "verl.workers.rollout.base:BaseRollout"
ENGINE: Final = "verl.checkpoint_engine.base:CheckpointEngine"
CLIENT: Final = "verl.workers.rollout.llm_server:LLMServerClient"
CALL: Final = (
    "(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
    "mm_processor_kwargs=None, **kwargs)"
)
MEMBERS: Final = {
    f"{REPLICA}.__init__": (
        "(self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False, is_teacher_model=False, "
        "name_suffix='')"
    ),
    f"{REPLICA}.init_standalone": "(self)",
    f"{REPLICA}.init_hybrid": "(self, worker_group)",
    f"{REPLICA}.init_hybrid_colocated": "(self, worker_group, resource_pool)",
    f"{REPLICA}.init_colocated": "(self, resource_pool)",
    f"{REPLICA}.launch_servers": "(self)",
    f"{REPLICA}.get_ray_class_with_init_args": "(self)",
    f"{REPLICA}.rollout_worker_use_gpu": "(self)",
    f"{REPLICA}.max_concurrency": "property",
    f"{REPLICA}.abort_all_requests": "(self, reject_request=False)",
    f"{REPLICA}.resume_generation": "(self)",
    f"{REPLICA}.clear_kv_cache": "(self)",
    f"{REPLICA}.release_kv_cache": "(self)",
    f"{REPLICA}.resume_kv_cache": "(self)",
    f"{REPLICA}.sleep": "(self)",
    f"{REPLICA}.wake_up": "(self)",
    f"{REPLICA}.start_profile": "(self, **kwargs)",
    f"{REPLICA}.stop_profile": "(self)",
    f"{ROLLOUT}.__init__": "(self, config, model_config, device_mesh, *args, **kwargs)",
    f"{ROLLOUT}.resume": "(self, tags)",
    f"{ROLLOUT}.release": "(self)",
    f"{ROLLOUT}.update_weights": "(self, weights, wire_format='named_tensors', **kwargs)",
    f"{ENGINE}.prepare": "(self)",
    f"{ENGINE}.build_topology": "(cls, actor_wg_world_size, rollout_world_size, metadata)",
    f"{ENGINE}.init_process_group": "(self, **kwargs)",
    f"{ENGINE}.send_weights": "(self, weights, global_steps=None)",
    f"{ENGINE}.receive_weights": "(self, global_steps=None)",
    f"{ENGINE}.finalize": "(self)",
    f"{CLIENT}._vllm_request_id": "(self, request_id)",
    f"{CLIENT}.generate": CALL,
    "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate": CALL,
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": "(cls, name, loader)",
    "verl.workers.rollout.replica:TokenOutput": (
        "(*, token_ids, log_probs=None, routed_experts=None, stop_reason=None, num_preempted=None, extra_fields={})"
    ),
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY": "dict",
    "verl.checkpoint_engine.base:CheckpointEngineRegistry.register": "(backend)",
    "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights": "(self, global_steps=None)",
}
"""Parameters of each member. A change is a new release of verl: read what it means, then change the adapter too."""

pytestmark = needs("verl")


async def test_the_released_verl_has_the_members_that_the_adapter_uses() -> None:
    """A member that was renamed, or has other parameters, is named with what it was and what it is."""
    found = await run_program(PROGRAM, *MEMBERS, python=find_python("verl"))
    differ = {name: (expected, found[name]) for name, expected in MEMBERS.items() if found[name] != expected}
    assert differ == {}


async def test_a_member_that_verl_lacks_is_named() -> None:
    """The program reports a member that is gone, so that the test above can fail."""
    gone = f"{REPLICA}.init_elsewhere"
    assert await run_program(PROGRAM, gone, python=find_python("verl")) == {gone: "missing"}
