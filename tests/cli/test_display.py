import os

import numpy as np
import pytest

from rollbus.frontend.cli.console import progress, waiting, write
from rollbus.frontend.cli.generate.command import describe
from rollbus.frontend.cli.generate.run import GenerateBar, count_text, pace_text
from rollbus.frontend.cli.tour import count_experts, expert_rows


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    """If the reader closes the pipe, like `head`, the remaining output is discarded and the exit code stays."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        write("to nobody", out=out)
        write("again", out=out)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress displays write nothing to logs and pipes."""
    with progress("working", 2) as advance, waiting("waiting") as show, GenerateBar(is_shown=True) as bar:
        advance()
        show("still waiting")
        bar.show("connecting")
        bar.start_count(2, 0, open_tokens=lambda: 0, reason=lambda: "")

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_experts_are_counted_by_layer() -> None:
    """Each choice counts once for its layer, in arrays of any length and dtype."""
    one = np.array([[[0, 1], [3, 3]], [[1, 2], [3, 0]]], np.uint8)
    other = np.array([[[1, 0], [0, 2]]], "<u2")

    counts = count_experts([one, other, np.zeros((0, 2, 2), np.uint8)], num_layers=2, num_experts=4)

    assert counts.tolist() == [[2, 3, 1, 0], [2, 0, 1, 3]]


def test_the_most_and_the_least_used_experts_are_named() -> None:
    """The shares refer to the choices of the layer. Experts that were never chosen are counted."""
    assert expert_rows(np.array([[6, 3, 1, 0], [0, 0, 0, 0]])) == [
        ["0", "0 (60%), 1 (30%), 2 (10%)", "1 (30%), 2 (10%), 3 (0%)", "1"],
        ["1", "0 (0%), 1 (0%), 2 (0%)", "1 (0%), 2 (0%), 3 (0%)", "4"],
    ]


@pytest.mark.parametrize(
    ("total", "ended", "rate", "seconds", "text"),
    [
        (9000, 1000, 0, 7.0, "1,000/9,000  7 s"),
        (9000, 1000, 77, 7.0, "1,000/9,000  77 tokens/s"),
        (9000, 2000, 12_345.6, 10.0, "2,000/9,000  12,346 tokens/s  1:10 left"),
        (9000, 1001, 0.5, 2.0, "1,001/9,000  0 tokens/s  4:26:38 left"),
        (9000, 9000, 2000, 8.0, "9,000/9,000  2,000 tokens/s"),
        (None, 2000, 5, 8.0, "2,000  5 tokens/s"),
    ],
)
def test_earlier_runs_do_not_count_for_the_time_left(
    total: int | None, ended: int, rate: float, seconds: float, text: str
) -> None:
    """The 1,000 prompts of earlier runs count as done, but not for the time left. Tokens count before a prompt ends."""
    assert pace_text(total, ended, before=1000, rate=rate, seconds=seconds) == text


def test_a_run_that_stops_early_reports_its_progress() -> None:
    """A run that stops early reports the number of finished prompts, and the number of failures if there are any."""
    assert count_text(290, 0, 1260) == "290 of 1,260 done; the same command continues"
    assert count_text(1290, 2, 2260) == "1,290 of 2,260 done, 2 failed; the same command continues"


def test_a_run_is_summed_up_in_one_line() -> None:
    """The summary mentions only counts that are not zero."""
    report = {
        "prompts": 5,
        "resumed": 0,
        "done": 5,
        "failed": 0,
        "first_error": None,
        "retryable": 0,
        "models": ["m"],
        "tokens": 80,
        "seconds": 0.5,
        "seconds_to": {"50": 0.2, "90": 0.3, "99": 0.4, "100": 0.4},
        "output": "o",
        "npz": None,
    }

    assert describe(report) == (
        "5 of 5 prompts done; model m; 80 tokens in 0.5 s; "
        "requests complete: 50 % after 0.2 s, 90 % after 0.3 s, 99 % after 0.4 s, 100 % after 0.4 s: o"
    )
    failed = {"resumed": 2, "done": 2, "failed": 2, "first_error": "line 4: no token", "retryable": 1, "seconds_to": {}}
    assert describe({**report, **failed, "models": ["m", "n"], "npz": "o.npz"}) == (
        "2 of 5 prompts done, 2 were done in earlier runs, 2 failed (the first, line 4: no token), "
        "run again to retry 1 of them; models m, n; 80 tokens in 0.5 s: o, o.npz"
    )
