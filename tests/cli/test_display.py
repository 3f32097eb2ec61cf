import io

import numpy as np
import pytest

from bus import QueueDepth
from frontend.cli.commands.generate import describe
from frontend.cli.commands.status import COLUMNS, QUEUE_COLUMNS, queue_rows, worker_row
from frontend.cli.console import plain_table, print_table, progress
from frontend.cli.expert_counts import count_experts, expert_rows
from schemas.presence import Capabilities, RoutedExpertsInfo, WorkerPresence, WorkerState


def test_a_piped_table_is_plain_text() -> None:
    """Into a pipe go aligned columns of any width, without borders or trailing blanks."""
    out = io.StringIO()

    print_table(("a", "long name"), [["wide cell" * 20, "1"], ["b", ""]], out=out)

    wide = len("wide cell" * 20)
    assert out.getvalue().splitlines() == ["a".ljust(wide) + "  long name", "wide cell" * 20 + "  1", "b"]
    assert plain_table(("a", "b"), []) == "a  b"


def test_a_terminal_table_has_borders_and_the_same_cells() -> None:
    """On a terminal the cells stand in a frame; text that looks like markup stays as it is."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()

    print_table(("name",), [["[bold]x"]], out=out)

    assert "[bold]x" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 5


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Logs and pipes get no bar."""
    with progress("working", 2) as advance:
        advance()

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_worker_has_a_cell_for_each_column() -> None:
    """A starting worker is shown as well as a serving one, whose routing is spelled out."""
    starting = WorkerPresence(
        worker="w", incarnation="i", model="m", state=WorkerState.STARTING, weight_version=3, in_flight=0, free_slots=0,
        uptime_s=59.9, lease_s=5,
    )  # fmt: skip
    known = Capabilities(
        engine="vllm", engine_version="0", max_model_len=512, vocab_size=9, max_num_seqs=8, max_logprobs=20, dtype="f",
        routed_experts=RoutedExpertsInfo(num_layers=4, top_k=2, num_experts=16, dtype="u1"),
    )  # fmt: skip
    serving = WorkerPresence(
        worker="w", incarnation="i", model="m", state=WorkerState.SERVING, weight_version=3, in_flight=2, free_slots=6,
        uptime_s=7260, lease_s=5, capabilities=known, last_error="oops",
    )  # fmt: skip

    assert dict(zip(COLUMNS, worker_row(starting), strict=True)) == {
        "worker": "w", "model": "m", "state": "starting", "weights": "3", "in flight": "0", "free slots": "0",
        "routing": "-", "max_model_len": "-", "uptime": "59s", "last error": "-",
    }  # fmt: skip
    assert worker_row(serving)[2:] == ["serving", "3", "2", "6", "4 layers, top 2 of 16, u1", "512", "2h01m", "oops"]


def test_experts_are_counted_by_layer() -> None:
    """Each choice counts once for its layer, over arrays of any length and dtype."""
    one = np.array([[[0, 1], [3, 3]], [[1, 2], [3, 0]]], np.uint8)
    other = np.array([[[1, 0], [0, 2]]], "<u2")

    counts = count_experts([one, other, np.zeros((0, 2, 2), np.uint8)], num_layers=2, num_experts=4)

    assert counts.tolist() == [[2, 3, 1, 0], [2, 0, 1, 3]]


def test_the_most_and_the_least_used_experts_are_named() -> None:
    """Shares are of the layer's choices; experts that were never chosen are counted."""
    assert expert_rows(np.array([[6, 3, 1, 0], [0, 0, 0, 0]])) == [
        ["0", "0 (60%), 1 (30%), 2 (10%)", "1 (30%), 2 (10%), 3 (0%)", "1"],
        ["1", "0 (0%), 1 (0%), 2 (0%)", "1 (0%), 2 (0%), 3 (0%)", "4"],
    ]


def test_a_run_is_summed_up_in_one_line() -> None:
    """Only what happened is mentioned."""
    report = {
        "prompts": 5,
        "resumed": 0,
        "done": 5,
        "failed": 0,
        "first_error": None,
        "retryable": 0,
        "tokens": 80,
        "seconds": 0.5,
        "output": "o",
        "npz": None,
    }

    assert describe(report) == "5 of 5 prompts done; 80 tokens in 0.5 s: o"
    failed = {"resumed": 2, "done": 2, "failed": 2, "first_error": "line 4: no token", "retryable": 1}
    assert describe({**report, **failed, "npz": "o.npz"}) == (
        "2 of 5 prompts done, 2 were done before, 2 failed (the first, line 4: no token), "
        "run again to retry 1 of them; 80 tokens in 0.5 s: o, o.npz"
    )


def test_a_queue_has_a_row_for_each_model() -> None:
    """What waits stands under its lane, what workers were handed is summed up; an unknown lane's depth is a dash."""
    depths = [
        QueueDepth(model="a", lane="resume", waiting=1, in_hand=2),
        QueueDepth(model="a", lane="high", waiting=3, in_hand=0),
        QueueDepth(model="a", lane="normal", waiting=40, in_hand=5),
        QueueDepth(model="a", lane="low", waiting=0, in_hand=0),
        QueueDepth(model="b", lane="normal", waiting=6, in_hand=0),
    ]

    rows = queue_rows(depths)

    assert rows == [["a", "1", "3", "40", "0", "7"], ["b", "-", "-", "6", "-", "0"]]
    assert {len(row) for row in rows} == {len(QUEUE_COLUMNS)}
    assert queue_rows([]) == []
