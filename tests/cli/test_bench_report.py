"""The report that `rollbus bench` makes of its rounds. The rounds are handmade."""

import json
from array import array

from rollbus.frontend.cli.bench import BenchOptions, ConcurrencyResult, Report, Round
from rollbus.frontend.cli.tables import Spread, percentile
from tests.support.presences import presence


def report(*outcomes: ConcurrencyResult) -> Report:
    """Return a report of these outcomes."""
    options = BenchOptions(input_tokens=7, output_tokens=5, rounds=2)
    return Report(command="rollbus bench", fleet="f", workers=[presence(model="m")], options=options, outcomes=outcomes)


def test_a_figure_is_a_median_with_its_range() -> None:
    """A figure shows median and range of the rounds with the significant digits. Equal values are shown once."""
    assert Spread.of([3.0, 100.0, 2.0]) == Spread(3.0, 2.0, 100.0)
    assert Spread.of([1234.5, 1000.0, 2000.4]).text() == "1,234 (1,000 to 2,000)"
    assert Spread.of([0.01234, 0.5]).text() == "0.256 (0.012 to 0.500)"
    assert Spread.of([12.5, 12.5]).text() == "12.5"


def test_a_percentile_is_one_of_the_values() -> None:
    """A percentile is the smallest value that so many percent of the values do not exceed, in any order."""
    values = array("f", range(100, 0, -1))

    assert (percentile(values, 50), percentile(values, 99), percentile([3.0, 1.0, 2.0], 50)) == (50.0, 99.0, 2.0)


def test_a_report_has_a_column_for_each_concurrency() -> None:
    """A report has medians and ranges of the rounds, sums of the errors, and each version that sampled a token."""
    one, two = ConcurrencyResult(1, 32), ConcurrencyResult(64, 256)
    for tokens in (100, 300, 200):
        one.add(Round(seconds=2.0, cpu_s=0.5, requests=1, tokens=tokens, routing_bytes=2_000_000, weight_versions={7}))
    both = {7, 8}
    streamed = Round(seconds=1.0, cpu_s=0.1, requests=2, tokens=100, retries=3, gaps=4, weight_versions=both)
    streamed.first_token_s.append(0.25)
    streamed.request_s.append(0.5)
    two.add(streamed)

    rows = {label: cells for label, *cells in report(one, two).rows()}

    assert rows["tokens/s"] == ["100 (50 to 150)", "100"]
    assert rows["requests/s"] == ["0.500", "2.00"]
    assert rows["client CPU, ms per 1,000 tokens"] == ["2,500 (1,667 to 5,000)", "1,000"]
    assert rows["routed experts, MB/s"] == ["1.00", "-"]
    assert rows["time to first token, p99, ms"] == ["-", "250"]
    assert "time between chunks, p50, ms" not in rows
    assert rows["attempts after the first"] == ["0", "3"]
    assert rows["gaps in frames"] == ["0", "4"]
    assert rows["weight versions"] == ["7", "7, 8"]
    first, second = json.loads(json.dumps(report(one, two).as_json()))["results"]
    assert first["tokens_per_s"] == {"median": 100, "low": 50, "high": 150}
    assert "first_token_p50_ms" not in first
    assert (second["first_token_p50_ms"]["median"], second["retries"], second["weight_versions"]) == (250, 3, [7, 8])


def test_a_failure_is_never_hidden() -> None:
    """A failure appears by its code in table and JSON and in the last line, also if it was a warm-up request."""
    outcome, other = ConcurrencyResult(1, 32), ConcurrencyResult(2, 32)
    warm_up = Round()
    warm_up.fail("timeout", "not finished within 3 s")
    warm_up.fail("engine_error", "it is broken")
    outcome.add_failures(warm_up)
    counted = Round(seconds=1.0, requests=1, tokens=1)
    counted.fail("engine_error", "it still is")
    counted.fail("engine_error", "and again")
    outcome.add(counted)
    other.add(Round(seconds=1.0, requests=1, tokens=1))
    told = report(outcome, other)

    rows = {label: cells for label, *cells in told.rows()}
    assert rows["failed requests"] == ["engine_error 3, timeout 1", "0"]
    first, second = json.loads(json.dumps(told.as_json()))["results"]
    assert (first["failures"], second["failures"]) == ({"engine_error": 3, "timeout": 1}, {})
    assert told.failure() == "failed requests: engine_error 3, timeout 1; the first: not finished within 3 s"
    assert report(other).failure() is None
