"""The golden messages of the control plane by name. As in `vectors`, messages are appended and never edited."""

import zlib

from msgspec import structs

from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import (
    Abort,
    CancelWeightUpdate,
    CheckWeights,
    Command,
    DesiredState,
    Drain,
    Fence,
    FinishWeightUpdate,
    FlushCache,
    InitWeightTransfer,
    LoadLora,
    Pause,
    ReadExperts,
    ReadRequest,
    Recorded,
    Restart,
    Resume,
    SeenCommand,
    Sleep,
    StartWeightUpdate,
    State,
    UnloadLora,
    UpdateWeightChunk,
    UpdateWeights,
    Wake,
)
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.telemetry import (
    ExpertCounts,
    ExpertLoad,
    RequestProgress,
    RequestTimeline,
    ServiceMessage,
    TimelineEvent,
    TokenTally,
    WaitingRequest,
)
from rollbus.schemas.weights import Canary, Staging, UpdateTiming, WeightSource

CANARY = Canary(token_ids=(5, 300), logprobs=(-0.5, -0.25), routed_experts="AAECAw==", shape=(2, 1, 2))
CHECKPOINT = WeightSource(path="/checkpoints/step_7")
PAUSE = Pause(id="p-1", model="org/model-1.5", epoch=41, mode="wait", clear_cache=True, timeout_s=30.0)
UPDATE = UpdateWeights(
    id="u-1",
    model="org/model-1.5",
    epoch=40,
    version=7,
    source=CHECKPOINT,
    mode="abort",
    clear_cache=False,
    allow_rollback=True,
    expected_canary=CANARY,
    timeout_s=120.0,
)
DIGEST = "5" * 64
PINNED = structs.replace(UPDATE, digest=DIGEST)
LOAD_LORA = LoadLora(
    id="l-1", model="org/model-1.5", epoch=39, name="style", version=3, source=WeightSource(objects="rollbus/style/3")
)
EXPERTS = ExpertLoad(
    number=9,
    first=8,
    seconds=10.0,
    num_layers=1,
    num_experts=4,
    top_k=2,
    counts=(
        ExpertCounts(
            weight_version=7,
            generated=zlib.compress(b"".join(n.to_bytes(8, "little") for n in (3, 1, 2, 0))),
            prompt_tokens=TokenTally(computed=5),
            generated_tokens=TokenTally(computed=4, seen=3),
        ),
    ),
)
TIMELINE = RequestTimeline(
    request_id="r-1",
    client="trainer-0",
    child=1,
    lane="normal",
    prompt_tokens=5,
    events=(
        TimelineEvent(at=1.0, event="published"),
        TimelineEvent(at=1.5, event="offered", weight_version=7),
        TimelineEvent(at=2.0, event="prefilled", tokens=5, cached_tokens=4),
        TimelineEvent(at=3.0, event="ended", tokens=4, reason="stop"),
    ),
)
PROGRESS = RequestProgress(seconds=2.5, idle_s=1.5)
RESUME_ONE = Resume(id="r-2", model="org/model-1.5", workers=("w1",), epoch=42)

CONTROL_VECTORS: dict[str, Command | Ack | DesiredState | ServiceMessage] = {
    "command_pause": PAUSE,
    "command_pause_by_hand": Pause(id="p-2"),
    "command_resume": RESUME_ONE,
    "command_drain": Drain(id="d-1", workers=("w0", "w1")),
    "command_flush_cache": FlushCache(id="f-1", preempt=True),
    "command_sleep": Sleep(id="s-1", level=2),
    "command_lend": Sleep(id="s-2", level=2, for_s=3600.0, workers=("w0",)),
    "command_wake": Wake(id="w-1"),
    "command_check_weights": CheckWeights(id="c-1", source=CHECKPOINT),
    "command_update_weights": UPDATE,
    "command_load_lora": LOAD_LORA,
    "command_unload_lora": UnloadLora(id="l-2", name="style"),
    "command_abort": Abort(id="a-1", request_ids=("r-1", "r-2")),
    "command_abort_all": Abort(id="a-2", request_ids=None),
    "command_state": State(id="st-1"),
    "command_read_experts": ReadExperts(id="re-1", since=7),
    "command_read_request": ReadRequest(id="rr-1", request_id="r-1"),
    "command_read_request_list": ReadRequest(id="rr-2", show="running", client="trainer-0", limit=20),
    "command_fence": Fence(id="fe-1", workers=("w0",), reason="its canary differs"),
    "command_init_weight_transfer": InitWeightTransfer(id="i-1", info={"master_port": 29500, "ranks": [0, 1]}),
    "command_start_weight_update": StartWeightUpdate(id="sw-1", mode="wait"),
    "command_update_weight_chunk": UpdateWeightChunk(id="uc-1", info={"names": ["lm_head.weight"]}),
    "command_finish_weight_update": FinishWeightUpdate(id="fw-1", version=8),
    "command_start_by_user": StartWeightUpdate(id="sw-2", by="http:admin"),
    "command_update_weight_chunk_of": UpdateWeightChunk(id="uc-2", info={}, transfer="sw-1"),
    "command_finish_weight_update_of": FinishWeightUpdate(id="fw-2", version=8, transfer="sw-1"),
    "command_cancel_weight_update": CancelWeightUpdate(id="cw-1", transfer="sw-1"),
    "command_restart": Restart(id="r-1", workers=("w0",), incarnation="i0"),
    "ack_accepted": Ack(
        id="u-1", command="update_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.ACCEPTED, epoch=40, weight_version=6, in_flight=12,
    ),
    "ack_progress": Ack(
        id="u-1", command="update_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.PROGRESS, epoch=40, stage="loading", weight_version=6, in_flight=12, seconds=0.5,
    ),
    "ack_applied": Ack(
        id="u-1", command="update_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, epoch=40, weight_version=7, in_flight=12, seconds=2.5, canary=CANARY,
        signature="cpu:1:bfloat16", frames={"trainer-0/life-1": 70},
    ),
    "ack_staging": Ack(
        id="c-1", command="check_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.PROGRESS, stage="fetching", weight_version=6, in_flight=12, seconds=1.5,
        progress=Staging(source="objects:weights/versions/7-1-0123abcd", stage="fetching", done_bytes=5, total_bytes=9),
    ),
    "ack_timing": Ack(
        id="u-1", command="update_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, epoch=40, weight_version=7, in_flight=12, seconds=2.5, canary=CANARY,
        timing=UpdateTiming(
            fetched_bytes=2**25, staged_s=1.0, waited_s=0.25, paused_s=1.25, loaded_s=0.75, canary_s=0.5
        ),
    ),
    "ack_failed": Ack(
        id="u-1", command="update_weights", worker="w1", incarnation="i1", model="org/model-1.5",
        status=AckStatus.FAILED, epoch=40, weight_version=6, seconds=0.25,
        error=AckError(code=ControlCode.BAD_SOURCE, message="model-00002-of-00002.safetensors is missing"),
    ),
    "ack_experts": Ack(
        id="re-1", command="read_experts", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, weight_version=7, experts=EXPERTS,
    ),
    "ack_timelines": Ack(
        id="rr-1", command="read_request", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, weight_version=7, timelines=(TIMELINE,),
    ),
    "ack_request_list": Ack(
        id="rr-2", command="read_request", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, weight_version=7, timelines_left_out=2,
        timelines=(structs.replace(TIMELINE, events=TIMELINE.events[:2], progress=PROGRESS),),
    ),
    "ack_unsupported": Ack(
        id="s-1", command="sleep", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.UNSUPPORTED, epoch=43,
        error=AckError(code=ControlCode.UNSUPPORTED, message="this engine cannot sleep"),
    ),
    "ack_stale": Ack(
        id="p-1", command="pause", worker="w1", incarnation="i1", model="org/model-1.5", status=AckStatus.STALE,
        epoch=41, error=AckError(code=ControlCode.STALE, message="epoch 42 has taken its place"),
    ),
    "ack_abort": Ack(
        id="a-1", command="abort", worker="w0", incarnation="i0", model="org/model-1.5", status=AckStatus.APPLIED,
        request_ids=("r-1",),
    ),
    "ack_state": Ack(
        id="st-1", command="state", worker="w0", incarnation="i0", model="org/model-1.5", status=AckStatus.APPLIED,
        state={"worker": "w0", "state": "serving"},
    ),
    "service_question": ServiceMessage(id="q-1", asks="abort", model="org/model-1.5", request_ids=("r-1", "a/b")),
    "service_answer": ServiceMessage(
        id="q-1", left_out=3,
        waiting=(WaitingRequest(request_id="a/b", wire_id="h-1", model="org/model-1.5", stage="turn", seconds=2.5),),
    ),
    "service_lives": ServiceMessage(),
    "service_ends": ServiceMessage(ends=True),
    "desired_empty": DesiredState(model="org/model-1.5"),
    "desired_of_bucket": DesiredState(model="m", epoch=1, bucket="4ec6e1d1d0b04b12a1a3a4ab0d0b7a52"),
    "desired_by": DesiredState(
        model="m", epoch=1, registers={"pause": Recorded(epoch=1, command=PAUSE, by="http:admin", at=1700000000.5)}
    ),
    "desired_full": DesiredState(
        model="org/model-1.5",
        epoch=42,
        registers={
            "pause": Recorded(epoch=41, command=PAUSE),
            "weights": Recorded(epoch=40, command=UPDATE),
            "lora:style": Recorded(epoch=39, command=LOAD_LORA),
        },
        workers={"w1": {"pause": Recorded(epoch=42, command=RESUME_ONE)}},
        seen=(SeenCommand("l-1", 39), SeenCommand("u-1", 40), SeenCommand("p-1", 41), SeenCommand("r-2", 42)),
    ),
    "command_check_adapter": CheckWeights(id="c-2", source=LOAD_LORA.source, adapter=True),
    "command_update_weights_pinned": PINNED,
    "command_load_lora_pinned": structs.replace(LOAD_LORA, digest=DIGEST),
    "command_load_lora_for_base": structs.replace(LOAD_LORA, name="synthetic", for_base=True),
    "ack_checked": Ack(
        id="c-1", command="check_weights", worker="w0", incarnation="i0", model="org/model-1.5",
        status=AckStatus.APPLIED, digest=DIGEST, path="/checkpoints/step_7",
    ),
    "desired_pinned": DesiredState(
        model="org/model-1.5", epoch=40, registers={"weights": Recorded(epoch=40, command=PINNED)}
    ),
}  # fmt: skip
