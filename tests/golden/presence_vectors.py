"""Golden messages of workers about themselves by name, as `vectors` has the others: appended to, never edited."""

from rollbus.schemas.presence import LoraInfo, WorkerCounters, WorkerPresence, WorkerState

__all__ = ["PRESENCE_VECTORS"]

PRESENCE_VECTORS: dict[str, WorkerPresence] = {
    "presence_counters": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.FENCED,
        weight_version=7,
        in_flight=0,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        counters=WorkerCounters(requests=3, ended=2, given_up=1, generated_tokens=2**40, credit_stalls=5, fences=1),
    ),
    "presence_paused": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.PAUSED,
        weight_version=7,
        in_flight=3,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        last_error="update_weights: model.safetensors is missing",
        pause_mode="keep",
        queued=1,
        target_version=8,
        epoch=41,
        loras=(LoraInfo(name="style", version=3),),
        lease_age_s=0.25,
    ),
    "presence_holder": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.UPDATING,
        weight_version=7,
        in_flight=0,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        host="node-3",
        pid=4711,
        held_s=58.5,
    ),
}
