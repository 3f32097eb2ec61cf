"""Hypothesis strategies for the control plane: commands, acks, desired states."""

import string

from hypothesis import strategies as st

from rollbus.schemas import control, limits
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import Command, DesiredState, Recorded, SeenCommand
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.weights import Canary, UpdateTiming, Verified, WeightSource
from tests.schemas.strategies import VERSION, json_values, maybe, names, request_ids, stagings, subject_tokens, texts

EPOCH = st.integers(0, 2**53)
NUMBER = st.floats(-1e6, 1e6)
modes = st.sampled_from(["abort", "wait", "keep"])
maps = st.dictionaries(names, json_values, max_size=3)
sources = st.builds(WeightSource, path=names) | st.builds(WeightSource, objects=names)
canaries = st.builds(
    Canary,
    token_ids=st.lists(st.integers(0, limits.MAX_TOKEN_ID), max_size=4).map(tuple),
    logprobs=st.lists(NUMBER, max_size=4).map(tuple),
    routed_experts=maybe(st.text(string.ascii_letters + "+/=", max_size=20)),
    shape=maybe(st.tuples(*[st.integers(0, 99)] * 3)),
)


def command(kind: type[Command], **fields: st.SearchStrategy[object]) -> st.SearchStrategy[Command]:
    """Draw commands of one kind, with or without the fields that each command may have."""
    return st.builds(
        kind,
        id=request_ids,
        model=maybe(names),
        workers=maybe(st.lists(subject_tokens, min_size=1, max_size=3).map(tuple)),
        epoch=maybe(EPOCH),
        timeout_s=st.floats(0, limits.MAX_TIMEOUT_S, exclude_min=True),
        **fields,
    )


commands: st.SearchStrategy[Command] = st.one_of(
    command(control.Pause, mode=modes, clear_cache=st.booleans()),
    command(control.Resume),
    command(control.Drain),
    command(control.FlushCache, preempt=st.booleans()),
    command(control.Sleep, level=st.sampled_from([1, 2])),
    command(control.Wake),
    command(control.CheckWeights, source=sources),
    command(
        control.UpdateWeights,
        version=VERSION,
        source=sources,
        mode=modes,
        clear_cache=maybe(st.booleans()),
        allow_rollback=st.booleans(),
        expected_canary=maybe(canaries),
    ),
    command(control.LoadLora, name=names, source=sources, version=VERSION),
    command(control.UnloadLora, name=names),
    command(control.Abort, request_ids=maybe(st.lists(request_ids, min_size=1, max_size=3).map(tuple))),
    command(control.State),
    command(control.ReadExperts, since=VERSION, window=st.sampled_from(["recent", "versions"])),
    command(control.ReadRequest, request_id=request_ids),
    command(
        control.ReadRequest,
        show=st.sampled_from(["running", "slowest", "failed", "resumed"]),
        limit=st.integers(1, 256),
    ),
    command(control.Fence, reason=texts),
    command(control.InitWeightTransfer, info=maps),
    command(control.StartWeightUpdate, mode=modes),
    command(control.UpdateWeightChunk, info=maps, transfer=maybe(names)),
    command(control.FinishWeightUpdate, version=VERSION, transfer=maybe(names)),
    command(control.CancelWeightUpdate, transfer=maybe(names)),
)
"""Any command."""

acks = st.builds(
    Ack,
    id=request_ids,
    command=names,
    worker=subject_tokens,
    incarnation=names,
    model=names,
    status=st.sampled_from(AckStatus),
    epoch=maybe(EPOCH),
    stage=maybe(texts),
    error=maybe(st.builds(AckError, code=st.sampled_from(ControlCode), message=texts)),
    weight_version=VERSION,
    in_flight=st.integers(0, 2**31),
    seconds=st.floats(0, 1e6),
    canary=maybe(canaries),
    signature=maybe(texts),
    frames=maybe(st.dictionaries(names, st.integers(0, 2**53), max_size=3)),
    request_ids=maybe(st.lists(request_ids, max_size=3).map(tuple)),
    state=json_values,
    verified=maybe(
        st.builds(
            Verified,
            probed=st.integers(0, 2**31),
            equal=st.integers(0, 2**31),
            compared=st.integers(0, 2**31),
            unprobed=st.lists(names, max_size=3).map(tuple),
            num_unprobed=st.integers(0, 2**31),
            seconds=st.floats(0, 1e6),
        )
    ),
    timing=maybe(
        st.builds(
            UpdateTiming,
            fetched_bytes=st.integers(0, 2**53),
            **{name: st.floats(0, 1e6) for name in UpdateTiming.__struct_fields__ if name != "fetched_bytes"},
        )
    ),
    progress=maybe(stagings),
)

registers = st.dictionaries(
    st.sampled_from(["pause", "weights", "flush", "sleep", "lora:a"]),
    st.builds(Recorded, epoch=EPOCH, command=commands),
    max_size=3,
)
desired_states = st.builds(
    DesiredState,
    model=names,
    epoch=EPOCH,
    registers=registers,
    workers=st.dictionaries(subject_tokens, registers, max_size=2),
    seen=st.lists(st.builds(SeenCommand, request_ids, EPOCH), max_size=limits.MAX_SEEN_COMMANDS).map(tuple),
    bucket=st.one_of(st.just(""), names),
)
