"""The screen of `rollbus top`, line by line, and the effect of keys."""

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len
from rich.text import Text

from rollbus import FleetState, QueueDepth
from rollbus.bus.protocol.telemetry.rates import FleetRates
from rollbus.frontend.cli.commands.views import SORTS
from rollbus.frontend.cli.watch.status import of_model
from rollbus.frontend.cli.watch.top import (
    KEY_OF,
    Key,
    KeyReader,
    Page,
    TopOptions,
    TopView,
    choose,
    command_rows,
    draw,
    model_rows,
    print_top,
    top_as_json,
)
from rollbus.schemas.control import DesiredState, Drain, LoadLora, Pause, Recorded, UpdateWeights
from rollbus.schemas.presence import EngineStats, WorkerCounters, WorkerPresence, WorkerState
from rollbus.schemas.weights import Staging, WeightSource
from tests.support.fleet import capabilities, presence

AT = time.mktime((2026, 11, 24, 14, 3, 22, 0, 0, -1))
DEFAULT = TopOptions()
HOSTILE = "[red]\x1b[2J\x1b]0;title\x07\r\nw9  serving\u202e\x9b31m[/red]"


def worker(name: str, seconds: int, **fields: Any) -> WorkerPresence:
    """Return the presence of a worker after so many seconds, at 50 tokens per second."""
    counters = WorkerCounters(
        generated_tokens=50 * seconds,
        requests=2 * seconds,
        first_tokens=2 * seconds,
        first_tokens_s=0.3 * seconds,
        next_tokens=48 * seconds,
        next_tokens_s=0.6 * seconds,
    )
    stats = EngineStats(kv_cache_use=0.4, prefix_cache_queries=1000 * seconds, prefix_cache_hits=250 * seconds)
    usual: dict[str, Any] = {
        "counters": counters,
        "engine_stats": stats,
        "in_flight": 12,
        "capabilities": capabilities(max_num_seqs=64),
        "weight_version": 3,
        "epoch": 4,
    }
    return presence(worker=name, **{**usual, **fields})


def view_of(*workers: dict[str, Any], problem: str | None = None, **known: Any) -> TopView:
    """Return the view of a fleet after two presences of each worker."""
    rates = FleetRates()
    for seconds in (1, 2):
        heard = [worker(**{"name": f"w{number}", **fields}, seconds=seconds) for number, fields in enumerate(workers)]
        rates.update([(one, float(seconds)) for one in heard])
    return TopView(FleetState(fleet="f", workers=tuple(heard), **known), rates, AT, problem)


DESIRED = DesiredState(
    model="m",
    epoch=4,
    registers={
        "weights": Recorded(
            epoch=4, command=UpdateWeights(version=4, source=WeightSource(path="/w/4"), label="s4", digest="0" * 64)
        ),
        "pause": Recorded(epoch=2, command=Pause(mode="wait")),
    },
    workers={
        "w1": {"pause": Recorded(epoch=3, command=Drain(workers=("w1",)))},
        "w2": {"pause": Recorded(epoch=3, command=Drain(workers=("w2",)))},
    },
)
SMALL = view_of(
    {"weight_version": 4},
    {"epoch": 3, "staging": Staging(source="/w/4", stage="fetching", done_bytes=2**29, total_bytes=2**30)},
    {"state": WorkerState.OUTDATED, "last_error": "no such folder", "target_version": 4},
    {"model": "n", "state": WorkerState.PAUSED, "pause_mode": "keep", "engine_stats": None},
    queues=(QueueDepth(model="m", lane="normal", waiting=7, in_hand=2),),
    desired={"m": DESIRED},
)

NARROW = """\
fleet f at 14:03:22  4 workers: 2 serving, 1 outdated, 1 paused
200 tokens/s  in flight 48/256  waiting 7  first 150 ms  next 12 ms  hits 25 %
queue  normal  in hand
m           7        2
model  workers  tokens/s  epoch  version  weights from  state
m            3       150      4        4  /w/4          paused (wait)
  behind: w1 has weights 3, not 4, fetching; w2 is outdated: no such folder
n            1      50.0      -        -  -             -
state          worker  model  version  in flight    KV  tokens/s   first   next
outdated       w2      m      3 of 4       12/64  40 %      50.0  150 ms  12 ms
  note: no such folder
paused (keep)  w3      n      3            12/64     -      50.0  150 ms  12 ms
serving        w0      m      4            12/64  40 %      50.0  150 ms  12 ms
serving        w1      m      3            12/64  40 %      50.0  150 ms  12 ms
  note: fetching 50 % of 1.0 GiB from /w/4
command                of  epoch  for        done
update_weights 4 (s4)  m       4  all        2 of 3
drain                  m       3  2 workers  2 of 2
pause wait             m       2  all        3 of 3




q quit  s sort: state  p model: all  up, down, page: lines 1 to 10 of 10
"""
WIDE_WORKERS = """\
state          worker  model  version  in flight    KV  tokens/s   first   next  hits  note
outdated       w2      m      3 of 4       12/64  40 %      50.0  150 ms  12 ms  25 %  no such folder
paused (keep)  w3      n      3            12/64     -      50.0  150 ms  12 ms     -
serving        w0      m      4            12/64  40 %      50.0  150 ms  12 ms  25 %
serving        w1      m      3            12/64  40 %      50.0  150 ms  12 ms  25 %  fetching 50 % of 1.0 GiB from /w/4
"""  # noqa: E501
WIDE_TOLD = """\
model  workers  tokens/s  epoch  version  weights from  state          behind
m            3       150      4        4  /w/4          paused (wait)  w1 has weights 3, not 4, fetching; w2 is outdated: no such folder
n            1      50.0      -        -  -             -              -
command                of  epoch  for        done
update_weights 4 (s4)  m       4  all        2 of 3
"""  # noqa: E501


def shown(view: TopView, options: TopOptions = DEFAULT, width: int = 80, height: int = 24) -> list[str]:
    """Return the lines of a screen without trailing blanks."""
    lines = draw(view, options, Page(), width, height).plain.split("\n")
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def column(view: TopView, number: int, options: TopOptions, width: int = 80) -> list[str]:
    """Return a column of the workers on a screen."""
    lines = shown(view, options, width)
    cells = [re.split(r" {2,}", line) for line in lines]
    return [cell[number] for cell in cells if len(cell) > number and re.match(r"w\d", cell[1])]


def test_a_small_screen_shows_all_parts() -> None:
    """A screen of 80 columns and 24 lines shows fleet, workers, queues, models, commands and keys."""
    assert shown(SMALL) == NARROW.splitlines()


def test_a_large_screen_shows_all_columns() -> None:
    """A screen of 200 columns and 60 lines shows all columns, and the reason for each worker that is behind."""
    text = "\n".join(shown(SMALL, width=200, height=60))

    assert WIDE_WORKERS in text
    assert WIDE_TOLD in text
    assert len(text.splitlines()) == 60


@given(st.integers(1, 250), st.integers(1, 100), st.sampled_from(SORTS), st.integers(0, 50))
def test_a_screen_of_any_size_is_filled_without_longer_lines(width: int, height: int, sort: Any, first: int) -> None:
    """A screen of any size is filled, and no line is longer than the terminal."""
    fleet = view_of(*[{}] * 30, problem="the connection to NATS is down", desired={"m": DESIRED})
    page = Page()
    page.first = first
    lines = draw(fleet, TopOptions(sort=sort), page, width, height).plain.split("\n")

    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width


def test_a_thousand_workers_are_scrolled() -> None:
    """The last page ends with the last worker, even after scrolling further, and the titles of the workers stay."""
    fleet, page = view_of(*[{"name": f"w{number:03}"} for number in range(1000)]), Page()
    page.press("end")
    page.press("down")
    first, *_, last, keys = draw(fleet, DEFAULT, page, 80, 24).plain.split("\n")

    assert first.startswith("fleet f at 14:03:22  1,000 workers")
    assert last.startswith("serving  w999 ")
    assert keys.endswith("page: lines 983 to 1,000 of 1,000")


@pytest.mark.parametrize(
    ("sort", "first"),
    [("worker", "w0"), ("state", "w2"), ("in-flight", "w1"), ("kv", "w3"), ("tokens", "w4"), ("hits", "w0")],
)
def test_workers_are_sorted(sort: Any, first: str) -> None:
    """Workers are sorted by ascending name, non-serving states first, or descending number with unknown values last."""
    fleet = view_of(
        {"engine_stats": EngineStats(prefix_cache_queries=10**6, prefix_cache_hits=10**6)},
        {"in_flight": 60},
        {"state": WorkerState.FENCED},
        {"engine_stats": EngineStats(kv_cache_use=0.9)},
        {"name": "w4"},
    )
    fleet.rates.observe(worker("w4", 2, counters=WorkerCounters(generated_tokens=9000, requests=9)), 3.0)
    fleet.rates.observe(worker("w4", 2, counters=WorkerCounters(generated_tokens=18000, requests=9)), 4.0)
    fleet.rates.observe(
        worker("w0", 2, engine_stats=EngineStats(prefix_cache_queries=2 * 10**6, prefix_cache_hits=2 * 10**6)), 3.0
    )

    assert column(fleet, 1, TopOptions(sort=sort))[0] == first
    assert len(column(fleet, 1, TopOptions(sort=sort))) == 5


def test_one_model_is_shown() -> None:
    """With one model selected, the screen shows only its workers, queue, commands and rates."""
    lines = shown(SMALL, TopOptions(model="n"))

    assert lines[0] == "fleet f, model n at 14:03:22  1 worker: 1 paused"
    assert lines[1].startswith("50.0 tokens/s  in flight 12/64  waiting -")
    assert column(SMALL, 1, TopOptions(model="n")) == ["w3"]
    assert not any(line.startswith(("m ", "update_weights", "queue")) for line in lines)
    assert "p model: n" in lines[-1]
    assert shown(SMALL, TopOptions(model="gone"))[0].endswith("0 workers")


def test_old_data_is_marked_while_nats_is_down() -> None:
    """If the NATS server is down, a line above the workers reports it, and the workers stay."""
    lines = shown(TopView(SMALL.state, SMALL.rates, AT, "the connection to NATS is down; known 3 s ago"))

    assert lines[2] == "the connection to NATS is down; known 3 s ago"
    assert column(SMALL, 1, TopOptions()) == ["w2", "w3", "w0", "w1"]


def test_a_queue_that_cannot_be_read_shows_the_reason() -> None:
    """A queue that cannot be read shows the reason, and the rest of the screen is complete."""
    fleet = view_of({}, queue_problems={"m": "this user may not read it"})
    lines = shown(fleet)

    assert "waiting -" in lines[1]
    assert "m      this user may not read it" in lines


@pytest.mark.parametrize("width", [80, 200])
def test_escapes_and_markup_of_peers_are_shown_as_text(width: int) -> None:
    """Escape sequences, line breaks, bidirectional marks and rich markup of peers are shown as plain text."""
    command = UpdateWeights(version=4, source=WeightSource(path=HOSTILE), label=HOSTILE)
    told = DesiredState(model=HOSTILE_MODEL, epoch=9, registers={"weights": Recorded(epoch=9, command=command)})
    fleet = view_of(
        {"model": HOSTILE_MODEL, "last_error": HOSTILE},
        {"staging": Staging(source=HOSTILE, stage=HOSTILE)},
        problem=HOSTILE,
        desired={HOSTILE_MODEL: told},
        queues=(QueueDepth(model=HOSTILE_MODEL, lane="normal", waiting=1, in_hand=0),),
        queue_problems={HOSTILE_MODEL: HOSTILE},
    )
    for options in (TopOptions(), TopOptions(model=HOSTILE_MODEL)):
        text = draw(fleet, options, Page(), width, 40)
        assert all(char.isprintable() or char == "\n" for char in text.plain)
        assert len(text.plain.split("\n")) == 40
        assert r"[red]\x1b[2J" in text.plain


HOSTILE_MODEL = "[blink]\u202emodel\u2066[/]"


def test_wide_characters_keep_columns_in_place() -> None:
    """Wide characters in a model name keep the columns aligned."""
    lines = shown(view_of({"model": "模型" * 20}, {}), width=60)

    assert max(map(cell_len, lines)) <= 60


def test_three_workers_that_are_behind_are_named_and_the_rest_counted() -> None:
    """Three of the workers that are behind are named with the reason, and the others are counted."""
    fleet = view_of(*[{"epoch": 1, "weight_version": 4}] * 5, desired={"m": DESIRED})

    [row] = model_rows(fleet.state, fleet.rates)
    assert row[-1] == "w0 is at epoch 1 of 4; w1 is at epoch 1 of 4; w2 is at epoch 1 of 4; and 2 more"


def test_a_command_for_a_single_worker_shows_the_name_of_the_worker() -> None:
    """A command for one worker shows the worker's name. A model without workers shows its commands too."""
    desired = DesiredState(
        model="x",
        epoch=2,
        registers={"lora:a": Recorded(epoch=1, command=LoadLora(name="a", version=7, source=WeightSource(path="/a")))},
        workers={"w9": {"pause": Recorded(epoch=2, command=Drain(workers=("w9",)))}},
    )
    fleet = FleetState(fleet="f", workers=(), desired={"x": desired})

    assert command_rows(fleet) == [["drain", "x", "2", "w9", "0 of 0"], ["load_lora a 7", "x", "1", "all", "0 of 0"]]
    assert command_rows(of_model(fleet, "y")) == []


def test_output_into_a_pipe_has_all_workers_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a pipe, `top` writes all workers and all columns, in 80 columns."""
    print_top(SMALL, TopOptions(sort="state"))
    fleet, workers, queues, models, commands = capsys.readouterr().out.strip().split("\n\n")

    assert fleet.endswith("hits 25 %  8.0 requests/s")
    rows = [line.split("  ")[0] for line in workers.splitlines()]
    assert [row for row in rows if row] == ["state", "outdated", "paused (keep)", "serving", "serving"]
    assert "  hits: 25 %; note: no such folder" in workers
    assert workers.count("hits: 25 %") == 3
    assert max(map(len, (*workers.splitlines(), *models.splitlines()))) <= 80
    assert [text.split()[0] for text in (queues, models, commands)] == ["queue", "model", "command"]


def test_json_has_the_state_and_the_rates() -> None:
    """The JSON has state and rates, and unknown values are null."""
    written = top_as_json(SMALL, TopOptions())

    assert {"fleet", "workers", "queues", "queue_problems", "desired", "rates"} == written.keys()
    assert written["rates"]["workers"]["w3"] == {
        "tokens_per_s": 50.0,
        "requests_per_s": 2.0,
        "first_token_s": pytest.approx(0.15),
        "between_tokens_s": pytest.approx(0.0125),
        "prefix_hit": None,
    }
    assert written["rates"]["models"]["m"]["tokens_per_s"] == 150
    assert written["rates"]["fleet"]["tokens_per_s"] == 200


def test_json_has_the_chosen_model_in_the_chosen_order() -> None:
    """`--model` and `--sort` have the same effect on the JSON as on the tables."""
    written = top_as_json(SMALL, TopOptions(sort="state", model="m"))

    assert [worker["worker"] for worker in written["workers"]] == ["w2", "w0", "w1"]
    assert (written["rates"]["models"].keys(), written["desired"].keys()) == ({"m"}, {"m"})
    assert written["rates"]["workers"].keys() == {"w0", "w1", "w2"}
    other = top_as_json(SMALL, TopOptions(model="n"))
    assert (other["queues"], other["desired"], other["rates"]["models"].keys()) == ([], {}, {"n"})


def test_keys_choose_what_is_shown() -> None:
    """Keys select the next sort and the next model, and other keys change neither."""
    options: TopOptions | None = TopOptions()
    for sort in (*SORTS[1:], SORTS[0]):
        assert options is not None
        options = choose(options, "sort", ["m", "n"])
        assert options == TopOptions(sort=sort)
    for model in ("m", "n", None):
        assert options is not None
        options = choose(options, "model", ["m", "n"])
        assert options == TopOptions(model=model)
    assert choose(TopOptions(model="gone"), "model", ["m"]) == TopOptions(model="m")
    assert choose(DEFAULT, "down", ["m"]) is None


def test_keys_scroll() -> None:
    """Arrow and page keys scroll, but neither above the first line nor below the last."""
    page, lines = Page(), [Text(f"line {number}") for number in range(50)]
    steps: list[tuple[Key, int]] = [("down", 1), ("page_down", 10), ("up", 9), ("page_up", 0), ("end", 41), ("home", 0)]
    for key, first in (*steps, steps[3]):
        assert page.press(key)
        assert page.draw(lines, 80, 10).plain.startswith(f"line {first}\n")
    assert not page.press("quit")


@given(st.data())
def test_key_sequences_are_recognized_in_any_fragmentation(data: st.DataObject) -> None:
    """Key sequences are recognized in any fragmentation, and other bytes are ignored."""
    noise = [b"\x1b[38;5;1m", b"x", b"\x1b[200~", b"\xc3\xa9", b"\x00"]
    sent = data.draw(st.lists(st.sampled_from([*KEY_OF, *noise]), max_size=20))
    text = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    reader = KeyReader()
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    keys = [key for piece in pieces for key in reader.read(piece)]
    assert keys == [KEY_OF[each] for each in sent if each in KEY_OF]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_input_that_is_no_key_neither_fails_nor_accumulates(pieces: list[bytes]) -> None:
    """Input that is not a key neither fails nor accumulates."""
    reader = KeyReader()
    for piece in pieces:
        reader.read(piece)
        assert len(reader._rest) <= 10


def test_a_worker_without_capabilities_shows_the_slots_of_its_presence() -> None:
    """A worker without capabilities shows the slots of its presence."""
    fleet = view_of({"capabilities": None, "free_slots": 3})

    assert "12/15" in shown(TopView(replace(fleet.state), fleet.rates, AT))[5]
