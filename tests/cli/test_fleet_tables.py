import re

import msgspec
from msgspec.structs import replace

from rollbus import FleetState, QueueDepth
from rollbus.frontend.cli.watch.status import (
    DESIRED_COLUMNS,
    ENGINE_COLUMNS,
    PREFIX_COLUMNS,
    PUBLISHED_COLUMNS,
    QUEUE_COLUMNS,
    WORKER_COLUMNS,
    desired_rows,
    engine_rows,
    prefix_rows,
    published_rows,
    queue_rows,
    state_as_json,
    worker_rows,
)
from rollbus.schemas.control import (
    AnyCommand,
    DesiredState,
    Drain,
    FinishWeightUpdate,
    LoadLora,
    Pause,
    Recorded,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
)
from rollbus.schemas.presence import EngineStats, LoraInfo, RoutedExpertsInfo, WorkerCounters, WorkerState
from rollbus.schemas.weights import PublishedVersion, Staging, WeightSource
from tests.cli.support import ROOT
from tests.support.presences import capabilities, presence

STARTING = presence(incarnation="i", state=WorkerState.STARTING, weight_version=3, free_slots=0, uptime_s=59.9)
MOE = capabilities(
    engine="vllm",
    engine_version="0.30",
    max_model_len=512,
    max_num_seqs=8,
    dtype="bfloat16",
    routed_experts=RoutedExpertsInfo(num_layers=4, top_k=2, num_experts=16, dtype="u1"),
    weight_updates=True,
    max_loras=2,
)
DENSE = replace(MOE, routed_experts=None, weight_updates=False, max_loras=0)
PAUSED = replace(
    STARTING,
    state=WorkerState.PAUSED,
    pause_mode="keep",
    in_flight=2,
    queued=1,
    free_slots=6,
    uptime_s=7260,
    capabilities=MOE,
    target_version=4,
    epoch=17,
    loras=(LoraInfo(name="math", version=2), LoraInfo(name="code", version=1)),
    lease_age_s=0.44,
    last_error="oops",
)


def recorded(epoch: int, command: AnyCommand) -> Recorded:
    """Return a register."""
    return Recorded(epoch=epoch, command=command)


DESIRED = DesiredState(
    model="m",
    epoch=9,
    registers={
        "weights": recorded(7, UpdateWeights(version=4, source=WeightSource(path="/w/4"))),
        "lora:math": recorded(3, LoadLora(name="math", source=WeightSource(objects="b/p"), version=2)),
        "lora:old": recorded(4, UnloadLora(name="old")),
        "pause": recorded(5, Pause(mode="wait")),
        "sleep": recorded(6, Sleep()),
    },
    workers={"w": {"pause": recorded(8, Drain())}, "x": {"pause": recorded(9, Resume())}},
)


def test_a_worker_has_a_cell_for_each_column() -> None:
    """A row has a cell for each column, for a worker that starts and for a worker with all values."""
    starting, paused = worker_rows([PAUSED, STARTING])

    assert dict(zip(WORKER_COLUMNS, starting, strict=True)) == {
        "state": "starting", "worker": "w", "model": "m", "role": "-", "version": "3", "in flight": "0/0",
        "queued": "0", "LoRAs": "-", "epoch": "0", "uptime": "59s", "lease age": "-", "note": "",
    }  # fmt: skip
    assert paused == [
        *("paused (keep)", "w", "m", "-", "3 of 4", "2/8", "1", "math (2), code (1)", "17", "2h01m", "-", "oops"),
    ]


def test_the_worst_state_comes_first() -> None:
    """Workers are listed by state, the worst first, then with an error before without, then by name."""
    states = (WorkerState.SERVING, WorkerState.PAUSED, WorkerState.UNKNOWN, WorkerState.FAILED, WorkerState.OUTDATED)
    workers = [replace(STARTING, worker=f"{state}", state=state) for state in states]
    broken = replace(STARTING, worker="z", state=WorkerState.SERVING, last_error="oops")

    assert [row[1] for row in worker_rows([*workers, broken])] == [
        "failed", "outdated", "unknown", "paused", "z", "serving"
    ]  # fmt: skip
    assert {row[0] for row in worker_rows([replace(STARTING, state=state) for state in WorkerState])} == {*WorkerState}


def test_a_late_lease_is_shown() -> None:
    """The age of a lease is shown from 2 s, because a healthy worker renews it every second."""
    ages = {row[1]: row[10] for row in worker_rows([replace(STARTING, worker=f"{s}", lease_age_s=s) for s in (1, 7)])}
    assert ages == {"1": "-", "7": "7 s"}


def test_the_note_has_the_staging_and_the_error() -> None:
    """The note of a worker has the progress of staging with its source, and the complete last error."""
    staging = Staging(source="objects:b/8", stage="fetching", done_bytes=2**29, total_bytes=2**30)
    [row] = worker_rows([replace(PAUSED, staging=staging)])

    assert row[-1] == "fetching 50 % of 1.0 GiB from objects:b/8; oops"


def test_the_newest_published_version_of_a_model_has_a_row() -> None:
    """Each model has one row with its newest published version. A store without a limit shows a dash."""
    older = PublishedVersion(version=7, stored_bytes=2**30)
    newer = PublishedVersion(version=8, stored_bytes=2**25, model_bytes=2**31, chain_length=3, used_bytes=2**32)
    [row] = published_rows([replace(PAUSED, published=newer), STARTING, replace(PAUSED, published=older)])

    assert dict(zip(PUBLISHED_COLUMNS, row, strict=True)) == {
        "published of": PAUSED.model, "version": "8", "stored": "32 MiB", "model": "2.0 GiB",
        "after anchor": "3", "store used": "4.0 GiB", "store limit": "-",
    }  # fmt: skip


def test_prefixes_and_placement_have_a_row() -> None:
    """Each worker that served or refused a request has a row. Without a prefix cache, the hit rate is a dash."""
    counters = WorkerCounters(
        requests=10, prompt_tokens=12_500, cached_prompt_tokens=9000, recomputed_prompt_tokens=3000,
        placed=7, placements_refused=1, placed_prefix=2, placed_group=4,
    )  # fmt: skip
    busy = replace(PAUSED, counters=counters, engine_stats=EngineStats(prefix_cache_queries=800, prefix_cache_hits=600))
    full = replace(PAUSED, worker="full", counters=WorkerCounters(placements_refused=2))
    idle = replace(PAUSED, counters=WorkerCounters())

    rows = prefix_rows([STARTING, busy, full, idle])

    assert [dict(zip(PREFIX_COLUMNS, row, strict=True)) for row in rows] == [
        {
            "worker": PAUSED.worker, "cache hits": "75.0 %", "prompt tokens": "12,500", "recomputed": "3,000",
            "queued": "3", "placed": "7", "prefix": "2", "group": "4", "session": "0", "able": "0", "refused": "1",
        },
        {
            "worker": "full", "cache hits": "-", "prompt tokens": "0", "recomputed": "0",
            "queued": "0", "placed": "0", "prefix": "0", "group": "0", "session": "0", "able": "0", "refused": "2",
        },
    ]  # fmt: skip


def test_engines_with_equal_capabilities_share_a_row() -> None:
    """Engines with equal capabilities share a row, which names only a few of many workers."""
    workers = [replace(PAUSED, worker=f"w{i}") for i in range(5)]
    other = replace(PAUSED, worker="d", capabilities=DENSE)

    rows = engine_rows([STARTING, *workers, other])

    assert [dict(zip(ENGINE_COLUMNS, row, strict=True)) for row in rows] == [
        {
            "engine": "vllm 0.30", "dtype": "bfloat16", "max_model_len": "512", "max_num_seqs": "8",
            "routed experts": "2 of 16 in 4 layers, u1", "can": "weights, 2 LoRAs",
            "workers": "w0, w1, w2 and 2 more",
        },
        {
            "engine": "vllm 0.30", "dtype": "bfloat16", "max_model_len": "512", "max_num_seqs": "8",
            "routed experts": "-", "can": "-", "workers": "d",
        },
    ]  # fmt: skip


def test_prefill_and_decode_workers_share_a_row_of_their_engine() -> None:
    """Prefill and decode workers share the row of their engine. The role is a column of the worker."""
    shared = replace(MOE, kv_connector="NixlConnector vllm-0.30.0 bfloat16")
    workers = [replace(PAUSED, worker=role, capabilities=replace(shared, role=role)) for role in ("prefill", "decode")]

    assert {row[3] for row in worker_rows(workers)} == {"prefill", "decode"}
    assert [row[-2:] for row in engine_rows(workers)] == [["weights, 2 LoRAs, KV by NixlConnector", "prefill, decode"]]


def test_a_queue_has_a_row_for_each_model() -> None:
    """Each model has one row with the waiting requests per lane and the sum of delivered requests.

    An unknown depth is a dash.
    """
    depths = [
        QueueDepth(model="a", lane="resume", waiting=1, in_hand=2),
        QueueDepth(model="a", lane="high", waiting=3, in_hand=0),
        QueueDepth(model="a", lane="normal", waiting=40, in_hand=5),
        QueueDepth(model="a", lane="low", waiting=0, in_hand=0),
        QueueDepth(model="b", lane="normal", waiting=6, in_hand=0),
    ]

    rows = queue_rows(depths)

    assert rows == [["a", "1", "3", "40", "0", "7", "-"], ["b", "-", "-", "6", "-", "0", "-"]]
    assert {len(row) for row in rows} == {len(QUEUE_COLUMNS)}
    assert queue_rows([]) == queue_rows([QueueDepth(model="a", lane="low", waiting=0, in_hand=0)]) == []


def test_a_queue_of_a_cluster_names_the_servers_that_are_behind() -> None:
    """The row shows the smallest number of replicas of the lanes, and each server that is behind once."""
    lanes = [
        QueueDepth(model="a", lane="high", waiting=0, in_hand=0, leader="n1", replicas=3, behind=("n0 (lags by 2)",)),
        QueueDepth(model="a", lane="low", waiting=0, in_hand=0, leader="n2", replicas=3, behind=("n0 (lags by 2)",)),
    ]

    assert queue_rows(lanes)[0][-1] == "3, behind: n0"


def test_the_desired_state_has_a_row_for_each_model_and_exception() -> None:
    """The desired state has a row per model and per worker with other registers.

    It shows only recorded commands that still apply.
    """
    rows = desired_rows({"m": DESIRED, "a": DesiredState(model="a")})

    assert rows == [
        ["a", "0", "-", "-", "-", "-"],
        ["m", "9", "4, unpinned", "/w/4", "paused (wait), asleep", "math (2, unpinned)"],
        ["m, only w", "-", "-", "-", "drained", "-"],
        ["m, only x", "-", "-", "-", "resumed", "-"],
    ]
    assert {len(row) for row in rows} == {len(DESIRED_COLUMNS)}
    transferred = DesiredState(model="m", registers={"weights": recorded(1, FinishWeightUpdate(version=8))})
    assert desired_rows({"m": transferred})[0][2:4] == ["8", "the transfer engine"]


STATE = FleetState(
    fleet="f",
    workers=(PAUSED,),
    queues=(QueueDepth(model="m", lane="high", waiting=3, in_hand=0),),
    desired={"m": DESIRED},
)


def test_the_names_of_the_state_are_documented() -> None:
    """docs/operate/commands.md lists all names that `rollbus status --json` prints, and the states of a worker."""
    page = re.sub(r"```.*?```", "", (ROOT / "docs/operate/commands.md").read_text(), flags=re.DOTALL)
    text = page.partition("## rollbus status")[2].partition("\n## ")[0]
    written = state_as_json(STATE)
    [worker], [queue] = written["workers"], written["queues"]
    known = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]+`", text))))

    assert {*written, *worker, *worker["capabilities"], *queue, *written["desired"]["m"]} - known == set()
    assert {state.value for state in WorkerState} - {"failed", "stopped", "unknown"} - known == set()


def test_the_names_of_the_state_are_stable() -> None:
    """The names in `rollbus status --json` are stable for programs: names may be added, but not changed."""
    written = msgspec.json.decode(msgspec.json.encode(state_as_json(STATE)))

    capabilities = [
        "engine", "engine_version", "max_model_len", "vocab_size", "max_num_seqs", "max_logprobs", "dtype",
        "routed_experts", "logprobs_mode", "priority", "extra", "signature", "weight_updates", "weight_transfer",
        "max_loras", "sleep", "data_parallel_size", "role", "kv_connector", "max_lora_rank",
        "world_size", "version_labels", "sampling_mask", "weight_deltas",
    ]  # fmt: skip
    worker = [
        "worker", "incarnation", "model", "state", "weight_version", "in_flight", "free_slots", "uptime_s", "lease_s",
        "capabilities", "held_bytes", "last_error", "model_path", "pause_mode", "queued", "target_version", "epoch",
        "loras", "lease_age_s", "counters",
    ]  # fmt: skip
    assert sorted(written) == ["desired", "fleet", "queue_problems", "queues", "workers"]
    [told] = written["workers"]
    assert set(told) >= set(worker)
    assert set(told["capabilities"]) >= set(capabilities)
    assert set(told["capabilities"]["routed_experts"]) >= {"num_layers", "top_k", "num_experts", "dtype"}
    assert told["loras"] == [{"name": "math", "version": 2}, {"name": "code", "version": 1}]
    [queue] = written["queues"]
    assert queue == {
        "model": "m",
        "lane": "high",
        "waiting": 3,
        "in_hand": 0,
        "leader": "",
        "replicas": 1,
        "behind": [],
    }
    desired = written["desired"]["m"]
    assert sorted(desired) == ["epoch", "registers", "workers"]
    weights = desired["registers"]["weights"]
    assert (weights["epoch"], weights["command"]["command"]) == (7, "update_weights")
    assert (weights["command"]["version"], weights["command"]["source"]["path"]) == (4, "/w/4")
    assert desired["workers"]["w"]["pause"]["command"]["command"] == "drain"
