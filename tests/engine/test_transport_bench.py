"""`bench.transport` compares equal work: the peer's events are those of vLLM, and all transports give equal tokens."""

import pytest

pytest.importorskip("vllm")

from bench.processes import Way
from bench.report import Report
from bench.transport import WAYS, measure, turn
from rollbus.frontend.cli.tables import Spread

pytestmark = pytest.mark.vllm


@pytest.mark.slow
async def test_all_transports_give_the_same_tokens() -> None:
    """A round runs each transport and compares their sums. Each row has its own costs and its ratio to the peer."""
    report = Report("transport")
    await measure(list(WAYS), [(3, 5)], 1, report)
    rows = {str(one["way"]): one for one in report.rows}
    assert rows.keys() == WAYS.keys()
    assert {"worker_cpu_ms", "client_cpu_ms", "nats_cpu_ms", "times_sse", "share_of_sse_cpu"} < rows["rollbus"].keys()
    assert rows["sse"]["tokens_at_a_time"] == Spread(1, 1, 1)
    assert rows["rollbus"]["tokens_at_a_time"] == Spread(5, 5, 5)


class FixedTransport(Way):
    """A transport that reports given numbers."""

    def __init__(self, name: str, **said: object) -> None:
        self.name = name
        self._said = said

    async def ask(self, *question: object) -> dict[str, object]:
        """Return the numbers like a transport that has measured."""
        return {"seconds": 2.0, "tokens": 15, "chunks": 3, "token_sum": 7, "logprob_sum": -1.5, **self._said}


@pytest.mark.parametrize("said", [{"tokens": 14}, {"token_sum": 8}, {"logprob_sum": -1.25}])
async def test_a_difference_ends_the_bench(said: dict[str, object]) -> None:
    """The bench fails at any difference between transports and prints no result."""
    assert len(await turn([FixedTransport("a"), FixedTransport("b")], (3, 5))) == 2
    with pytest.raises(RuntimeError, match="3x5"):
        await turn([FixedTransport("a"), FixedTransport("b", **said)], (3, 5))
