"""Where a request goes: to one worker or to the queue. Each model has its own policy."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.load import MAX_REQUESTS, PIECE_TOKENS, CacheId, PrefixScope, WorkerLoad, piece_hashes
from rollbus.bus.protocol.queue.placement import (
    RUNNING_TOKENS,
    WAIT_TOKENS,
    ModelPolicies,
    Placement,
    PlacementNeeds,
    PlacementPolicy,
    PlacementReason,
    may_wait,
    rendezvous,
)
from rollbus.schemas.presence import EngineStats
from tests.protocol.placement.worlds import fleet, loads, placement_needs, presence, prompt

QUEUED = Placement(None, PlacementReason.QUEUED)
WORKERS = ("a", "b", "c", "d")


def idle_fleet(*workers: str, free_slots: int = 8) -> tuple[PlacementPolicy, list[WorkerLoad]]:
    """Return a policy and the loads of workers without requests."""
    policy = fleet(*(presence(worker, free_slots=free_slots) for worker in workers))
    return policy, loads(policy, *workers)


def test_an_unknown_prompt_is_queued() -> None:
    """If no worker has a prefix of the prompt, the request is queued."""
    policy, able = idle_fleet(*WORKERS)
    policy.admitted(placement_needs(prompt(1)), "a", 1, was_placed=False)

    assert policy.place(placement_needs(prompt(2)), able, 1) == QUEUED


def test_the_next_turn_goes_to_the_worker_of_the_last_turn() -> None:
    """The next turn goes to the worker of the last turn. All tokens that this worker computed count as cached."""
    policy, able = idle_fleet("a", "b")
    first = prompt(1, 1000)
    cache = policy.admitted(placement_needs(first), "b", 1, was_placed=False)
    assert cache is not None
    turn = np.concatenate([first, prompt(2, 600)])
    policy.ended(cache, piece_hashes(turn, PrefixScope()), 2)

    placement = policy.place(placement_needs(np.concatenate([turn, prompt(3, 100)])), able, 60)
    assert placement == ("b", PlacementReason.PLACED_PREFIX, 1600 // PIECE_TOKENS * PIECE_TOKENS)


def test_known_prefixes_are_invalid_after_the_cache_of_the_worker_is_lost() -> None:
    """A new cache epoch, a lost worker and the next version of an adapter invalidate known prefixes."""
    policy, able = idle_fleet("a", "b")
    lora = placement_needs(prompt(1), scope=PrefixScope("x", 1))
    for each in (placement_needs(prompt(1)), lora):
        policy.admitted(each, "b", 1, was_placed=False)
    assert policy.place(lora, able, 2).worker == "b"
    assert policy.place(placement_needs(prompt(1), scope=PrefixScope("x", 2)), able, 2) == QUEUED
    policy.update(presence("b", cache_epoch=1), 3)
    assert policy.place(lora, able, 3) == QUEUED
    policy.admitted(lora, "b", 4, was_placed=False)
    policy.remove("b")

    assert policy.place(lora, loads(policy, "a"), 5) == QUEUED


def test_a_request_of_an_earlier_epoch_is_not_recorded_for_the_next_epoch() -> None:
    """A request accepted before a weight update leaves nothing in the cache of the next epoch."""
    policy, able = idle_fleet("a", "b")
    cache = policy.admitted(placement_needs(prompt(1)), "b", 1, was_placed=False)
    assert cache is not None
    policy.update(presence("b", cache_epoch=1), 2)
    policy.ended(cache, placement_needs(prompt(1)).pieces, 3)

    assert policy.place(placement_needs(prompt(1)), able, 4) == QUEUED


def test_a_full_worker_gets_no_request() -> None:
    """If the worker with the prefix is full, the request goes to the queue immediately and does not wait."""
    policy, able = idle_fleet("a", "b", free_slots=1)
    policy.admitted(placement_needs(prompt(1)), "b", 1, was_placed=False)
    assert policy.place(placement_needs(prompt(1)), able, 2) == QUEUED
    policy.update(presence("b", free_slots=1), 3)
    placement = policy.place(placement_needs(prompt(1)), able, 3)
    assert placement.worker == "b"
    policy.placed(placement_needs(prompt(1)), placement, 3)

    assert policy.place(placement_needs(prompt(1)), able, 3) == QUEUED


@pytest.mark.parametrize("num_workers", [2, 4, 64])
def test_requests_with_a_hot_prefix_spread_to_other_workers_by_load(num_workers: int) -> None:
    """The worker that first has a hot prefix gets little more load than its saving is worth."""
    names = [f"w{i}" for i in range(num_workers)]
    policy, able = idle_fleet(*names, free_slots=10_000)
    hot, running = prompt(1, 4096), Counter[str]()
    policy.admitted(placement_needs(hot), "w0", 0, was_placed=False)
    for i in range(100 * num_workers):
        now = 1 + i / 10
        placement = policy.place(placement_needs(hot), able, now)
        # The queue distributes its requests among all workers.
        worker = placement.worker or names[i % num_workers]
        if placement.worker is not None:
            policy.placed(placement_needs(hot), placement, now)
        policy.admitted(placement_needs(hot), worker, now, was_placed=placement.worker is not None)
        running[worker] += 1

    assert max(running.values()) - min(running.values()) <= 4096 / RUNNING_TOKENS + 10
    assert len(running) == num_workers


def test_requests_with_a_prefix_that_most_workers_have_are_queued() -> None:
    """A prefix that all workers have causes no placement, because it would save nothing. A longer prefix still does."""
    policy, able = idle_fleet(*WORKERS)
    shared = prompt(1, 4096)
    for worker in WORKERS:
        policy.admitted(placement_needs(shared), worker, 1, was_placed=False)
    turn = placement_needs(np.concatenate([shared, prompt(2, 1024)]))
    policy.admitted(turn, "c", 1, was_placed=False)

    assert policy.place(placement_needs(shared), able, 60) == QUEUED
    assert policy.place(turn, able, 60) == ("c", PlacementReason.PLACED_PREFIX, 5120)


def test_waiting_prompts_of_a_worker_are_weighed_against_the_saved_tokens() -> None:
    """Prompts that wait at the worker with the prefix cost half of their tokens until they are computed."""
    policy, able = idle_fleet("a", "b", free_slots=100)
    policy.admitted(placement_needs(prompt(1, 2048)), "a", 0, was_placed=False)
    assert policy.place(placement_needs(prompt(1, 2048)), able, 1).worker == "a"
    policy.admitted(placement_needs(prompt(2, 5000)), "a", 1, was_placed=False)
    assert policy.place(placement_needs(prompt(1, 2048)), able, 1) == QUEUED

    assert policy.place(placement_needs(prompt(1, 2048)), able, 2).worker == "a"


def test_running_requests_of_a_worker_are_weighed_against_the_saved_tokens() -> None:
    """Each additional running request at the worker with the prefix costs as much as some tokens of the prompt."""
    policy, able = idle_fleet("a", "b", free_slots=100)
    policy.admitted(placement_needs(prompt(1, 2048)), "a", 0, was_placed=False)
    worth = 2048 // RUNNING_TOKENS
    policy.update(presence("a", free_slots=100, in_flight=worth - 1), 9)
    assert policy.place(placement_needs(prompt(1, 2048)), able, 9).worker == "a"
    policy.update(presence("a", free_slots=100, in_flight=worth + 1), 9)

    assert policy.place(placement_needs(prompt(1, 2048)), able, 9) == QUEUED


def test_load_is_compared_with_most_workers_and_not_with_the_busiest_worker() -> None:
    """A cached prefix must outweigh the worker's load relative to most workers, not relative to the busiest worker."""
    policy, able = idle_fleet(*WORKERS, free_slots=1000)
    policy.admitted(placement_needs(prompt(1, 1024)), "a", 0, was_placed=False)
    policy.update(presence("a", in_flight=20), 9)
    policy.update(presence("d", in_flight=500), 9)
    assert policy.place(placement_needs(prompt(1, 1024)), able, 9) == QUEUED
    for worker in "bc":
        policy.update(presence(worker, in_flight=20), 9)

    assert policy.place(placement_needs(prompt(1, 1024)), able, 9).worker == "a"


def test_another_worker_recomputes_the_prefixes_of_a_slow_worker() -> None:
    """Another worker recomputes a prefix that a worker with half the announced prefill rate has cached."""
    stats = {w: EngineStats(prefill_tokens_per_s=2e4 if w != "d" else 1e4) for w in WORKERS}
    policy = fleet(*(presence(worker, engine_stats=each) for worker, each in stats.items()))
    policy.update(presence("d", engine_stats=stats["d"]), 1)
    for i, worker in enumerate(WORKERS):
        policy.admitted(placement_needs(prompt(i, 4096)), worker, 1, was_placed=False)
    placed = [policy.place(placement_needs(prompt(i, 4096)), loads(policy, *WORKERS), 60).worker for i in range(4)]

    assert placed == ["a", "b", "c", None]


def test_a_session_stays_with_its_worker() -> None:
    """The turns of a session go to the worker of its last turn, also if their prompts are short or have changed."""
    policy, able = idle_fleet(*WORKERS)
    for turn, tokens in enumerate((40, 300, 3000)):
        for session in "xyz":
            policy.admitted(placement_needs(prompt(turn, tokens), session=session), "c", turn, was_placed=False)
        for load in able:
            policy.update(presence(load.worker), 60 * (turn + 1))
        request = placement_needs(prompt(100 + turn, tokens), session="y")
        placement = policy.place(request, able, 60 * (turn + 1))
        assert placement == ("c", PlacementReason.PLACED_SESSION, 0)


def test_a_session_leaves_a_worker_that_is_too_busy() -> None:
    """A session counts as if all of the prompt except one piece were cached, and not more."""
    policy, able = idle_fleet("a", "b", free_slots=1000)
    request = placement_needs(prompt(1, 2048), session="x")
    policy.admitted(request, "a", 0, was_placed=False)
    policy.update(presence("a", free_slots=1000, in_flight=100), 60)

    assert policy.place(request, able, 60) == QUEUED


def test_a_turn_of_a_session_waits_at_the_full_worker_that_has_its_prompt() -> None:
    """A turn keeps its place at a full worker for 1,024 cached tokens and more, until the worker's cache evicts it."""
    policy = fleet(presence("a", free_slots=3), presence("b"))
    request, short = placement_needs(prompt(1), session="x"), placement_needs(prompt(2, WAIT_TOKENS - 1), session="y")
    able = loads(policy, "a", "b")
    for each in (request, short):
        policy.admitted(each, "a", 0, was_placed=False)
    assert policy.keep_place(request, able, 1) == QUEUED  # it has a free slot
    policy.update(presence("a", free_slots=0, in_flight=2), 1)
    assert policy.place(request, able, 1) == QUEUED
    assert policy.keep_place(request, able, 1) == ("a", PlacementReason.PLACED_SESSION, 8 * PIECE_TOKENS)
    assert may_wait(request, policy.keep_place(request, able, 1))
    assert policy.keep_place(short, able, 1) == QUEUED
    assert policy.keep_place(placement_needs(prompt(1), session="other"), able, 1) == QUEUED
    assert policy.keep_place(placement_needs(prompt(1), session="x", group="g"), able, 1) == QUEUED
    assert policy.keep_place(request, loads(policy, "b"), 1) == QUEUED
    policy.update(presence("a", free_slots=0, in_flight=2, oldest_prefix_s=30.0), 60)
    assert policy.keep_place(request, able, 60) == QUEUED
    policy.admitted(request, "b", 61, was_placed=False)
    policy.update(presence("b", free_slots=0, in_flight=8), 62)
    assert policy.keep_place(request, able, 62).worker == "b"


def test_the_turns_that_one_client_sends_to_a_full_worker_are_bounded() -> None:
    """Above its free slots, a worker gets at most as many turns as it has slots until its next presence, or rejects."""
    policy = fleet(presence("a", free_slots=0, in_flight=4))
    able, request = loads(policy, "a"), placement_needs(prompt(1), session="x")
    policy.admitted(request, "a", 0, was_placed=False)
    policy.update(presence("a", free_slots=0, in_flight=4), 1)
    num_sent = 0
    while (kept := policy.keep_place(request, able, 1)).worker:
        policy.placed(request, kept, 1)
        num_sent += 1
    assert num_sent == 4
    policy.update(presence("a", free_slots=0, in_flight=4), 2)
    assert policy.keep_place(request, able, 2).worker == "a"
    policy.refused(request, "a", 2)
    assert policy.keep_place(request, able, 2) == QUEUED


def test_all_clients_place_an_unknown_session_on_the_same_worker() -> None:
    """All clients place an unknown session on the same worker, and sessions are spread over all workers."""
    policies = [idle_fleet(*WORKERS), idle_fleet(*reversed(WORKERS))]
    chosen = [
        {policy.place(placement_needs(prompt(i), session=f"s{i}"), able, 1) for policy, able in policies}
        for i in range(50)
    ]

    assert all(len(each) == 1 for each in chosen)
    assert {placement.worker for each in chosen for placement in each} == set(WORKERS)


def test_a_session_whose_worker_cannot_serve_the_request_goes_to_another_worker() -> None:
    """A session whose worker cannot serve the request goes to a worker that can."""
    policy, _ = idle_fleet(*WORKERS)
    policy.admitted(placement_needs(prompt(1), session="x"), "c", 1, was_placed=False)
    placement = policy.place(placement_needs(prompt(1), session="x"), loads(policy, "a", "b"), 60)

    assert placement.worker in {"a", "b"}


def test_a_request_that_only_some_workers_can_serve_is_placed() -> None:
    """While only some workers can serve a request, the least loaded of these that has room gets it."""
    policy = fleet(presence("a", in_flight=5), presence("b", in_flight=3), presence("old"))
    request = placement_needs(prompt(1, 40), is_for_able_only=True)
    able = loads(policy, "a", "b")
    assert policy.place(request, able, 1) == ("b", PlacementReason.PLACED_ABLE, 0)
    policy.update(presence("b", in_flight=3, free_slots=0), 2)
    assert policy.place(request, able, 2).worker == "a"
    policy.silent(request, "a", 2)

    assert policy.place(request, able, 2) == QUEUED
    assert policy.place(request, [], 2) == QUEUED


def test_hash_collisions_do_not_prevent_placement_or_queueing() -> None:
    """If all pieces have the same hash, requests are still placed or queued."""
    policy, able = idle_fleet(*WORKERS)
    policy.admitted(PlacementNeeds(1024, (7, 7, 7, 7), PrefixScope()), "a", 1, was_placed=False)
    placement = policy.place(PlacementNeeds(512, (7, 7), PrefixScope()), able, 60)

    assert placement == ("a", PlacementReason.PLACED_PREFIX, 512)


def test_groups_with_different_prompts_start_on_different_workers() -> None:
    """Among equal workers, groups with different prompts start on different workers."""
    policy, able = idle_fleet(*WORKERS)
    first = {policy.place(placement_needs(prompt(i), group=f"g{i}"), able, 1).worker for i in range(40)}

    assert first == set(WORKERS)


loads_of_worker = st.tuples(st.integers(0, 3), st.integers(0, 40), st.sampled_from([None, 1e3, 2e4]))
requests = st.tuples(st.integers(0, 3), st.integers(0, 8), st.none() | st.just("x"), st.none() | st.just("g"))


@given(
    st.lists(loads_of_worker, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 8)), max_size=6),
    st.lists(requests, min_size=1, max_size=6),
    st.booleans(),
    st.sets(st.integers(0, 5)),
)
def test_a_chosen_worker_can_serve_the_request_and_has_room(
    announced: list[tuple[int, int, float | None]],
    admitted: list[tuple[int, int, int]],
    wanted_ones: list[tuple[int, int, str | None, str | None]],
    is_for_able_only: bool,
    left_out: set[int],
) -> None:
    """A chosen worker is able to serve the request and has room.

    A worker chosen only for its prefix is ahead of the others.
    """
    policy = PlacementPolicy()
    for i, (free_slots, in_flight, prefill) in enumerate(announced):
        stats = EngineStats(prefill_tokens_per_s=prefill)
        policy.update(presence(f"w{i}", free_slots=free_slots, in_flight=in_flight, engine_stats=stats), 0)
    for worker, seed, pieces in admitted:
        policy.admitted(placement_needs(prompt(seed, pieces * PIECE_TOKENS)), f"w{worker}", 0, was_placed=True)
    able = loads(policy, *(f"w{i}" for i in range(len(announced)) if i not in left_out))
    for seed, pieces, session, group in wanted_ones:
        request = placement_needs(
            prompt(seed, pieces * PIECE_TOKENS + 9), session=session, group=group, is_for_able_only=is_for_able_only
        )
        placement = policy.place(request, able, 1)
        chosen = [load for load in able if load.worker == placement.worker]
        assert (placement.worker is None) == (placement.reason is PlacementReason.QUEUED)
        if placement.reason is not PlacementReason.PLACED_GROUP:
            assert placement.cached_tokens == policy.index.longest(request.pieces, 1).get(placement.worker or "", 0)
        if placement.worker is None:
            assert not (is_for_able_only and any(load.room(1) for load in able))
            continue
        assert [load.room(1) > 0 for load in chosen] == [True]
        policy.placed(request, placement, 1)
        if placement.reason is PlacementReason.PLACED_PREFIX:
            assert placement.cached_tokens > 0
            # With its saving, the chosen worker has less work than half of the other workers without any saving.
            work = chosen[0].slowness * (chosen[0].running - 1) * RUNNING_TOKENS - placement.cached_tokens
            others = [load.slowness * load.running * RUNNING_TOKENS for load in able if load not in chosen]
            if {load.slowness for load in able} == {1.0}:
                assert sum(work <= other + 8 * PIECE_TOKENS for other in others) >= len(others) // 2


def test_a_group_leaves_a_worker_that_refuses_or_is_silent() -> None:
    """After a refusal, the next request of a group goes to another worker.

    A silent worker gets no request for ten seconds.
    """
    policy, able = idle_fleet(*WORKERS)
    request = placement_needs(prompt(1), group="g")
    seen = set()
    for fail in (policy.refused, policy.silent, policy.refused):
        placement = policy.place(request, able, 1)
        assert placement.worker is not None
        policy.placed(request, placement, 1)
        fail(request, placement.worker, 1)
        seen.add(placement.worker)

    assert len(seen) == 3


@pytest.mark.parametrize("is_silent", [False, True])
def test_after_a_refused_first_request_the_next_request_computes_the_prompt(is_silent: bool) -> None:
    """If a worker did not accept the first request of a group, the next request there must compute the prompt."""
    policy, able = idle_fleet("a")
    request = placement_needs(prompt(1), group="g")
    for now in (1, 20):
        policy.update(presence("a"), now)
        placement = policy.place(request, able, now)
        assert placement == Placement("a", PlacementReason.PLACED_GROUP, 0)
        policy.placed(request, placement, now)
        (policy.silent if is_silent else policy.refused)(request, "a", now)


def test_a_worker_with_an_unknown_cache_may_accept_a_request() -> None:
    """A worker may accept a request before its first presence, or after it was marked lost."""
    policy, able = idle_fleet("a")
    policy.placed(placement_needs(prompt(1), group="g"), Placement("new", PlacementReason.PLACED_GROUP), 1)
    assert policy.admitted(placement_needs(prompt(1), session="s"), "new", 1, was_placed=False) is None
    policy.ended(CacheId("new", "i1", 0), placement_needs(prompt(1)).pieces, 2)
    policy.refused(placement_needs(prompt(1), group="g"), "new", 2)
    policy.silent(placement_needs(prompt(1)), "new", 2)
    policy.remove("new")

    assert policy.place(placement_needs(prompt(1)), able, 3) == QUEUED


@pytest.mark.parametrize("fields", [{"in_flight": 10**400}, {"free_slots": 10**400}, {"cache_epoch": 10**400}])
def test_an_announced_number_of_any_size_does_not_prevent_placement(fields: dict[str, int]) -> None:
    """A worker that announces a number too large for a float does not prevent placement on other workers."""
    policy = fleet(presence("a"), presence("b"), presence("liar", **fields))
    able = loads(policy, "a", "b", "liar")
    request = placement_needs(prompt(1), session="s", group="g")
    placements = [policy.place(request, able, 1), *policy.place_group(request, 4, able, 1)]

    assert None not in {placement.worker for placement in placements}
    assert policy.loads.free_slots("liar", 1) <= MAX_REQUESTS


events = st.lists(st.tuples(st.sampled_from("vw"), st.sampled_from(["a", "b", "c", None])), max_size=20)


@given(events)
def test_a_model_has_a_policy_while_a_worker_has_the_model(events: list[tuple[str, str | None]]) -> None:
    """After any presence and losses, exactly the models of live workers have policies, each with its own workers."""
    policies, live = ModelPolicies(), dict[str, str]()
    for worker, model in events:
        if model is None:
            policies.remove(worker)
            live.pop(worker, None)
        else:
            policies.update(presence(worker, model=model), 0.0)
            live[worker] = model

    assert len(policies) == len(set(live.values()))
    for model in "abc":
        loads = policies.of(model).loads
        assert {worker for worker in "vw" if loads.get(worker) is not None} == {w for w in live if live[w] == model}


TEN_WORKERS = [f"worker-{i}" for i in range(16)]
KEYS = [f"session-{i}" for i in range(16_000)]


def test_the_choice_depends_only_on_the_names() -> None:
    """The choice depends only on the names, not on the order of the workers or on the process."""
    assert [rendezvous(key, TEN_WORKERS) for key in KEYS] == [rendezvous(key, TEN_WORKERS[::-1]) for key in KEYS]
    assert [rendezvous(key, TEN_WORKERS) for key in ("a", "b", "c")] == ["worker-14", "worker-2", "worker-3"]


def test_each_worker_gets_about_an_equal_share_of_the_keys() -> None:
    """Each worker gets an equal share of the keys, within a tenth."""
    counts = Counter(rendezvous(key, TEN_WORKERS) for key in KEYS)
    assert set(counts) == set(TEN_WORKERS)
    assert all(900 <= count <= 1100 for count in counts.values())


@pytest.mark.parametrize("gone", TEN_WORKERS[::5])
def test_if_a_worker_is_removed_only_its_keys_move(gone: str) -> None:
    """If a worker is removed, only its keys move, and they are spread over all other workers."""
    left = [worker for worker in TEN_WORKERS if worker != gone]
    before = {key: rendezvous(key, TEN_WORKERS) for key in KEYS}
    after = {key: rendezvous(key, left) for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
    assert {after[key] for key in KEYS if before[key] == gone} == set(left)
