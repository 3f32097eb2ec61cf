"""`bench.transport` compares equal work: the peer's events are those of vLLM, and all transports give equal tokens."""

import pytest

pytest.importorskip("vllm")

from bench.processes import Way
from bench.report import Report, rate
from bench.transport import WAYS, cpu_ms, event, measure, row, turn
from rollbus.frontend.cli.tables import Spread
from rollbus.schemas.chunk import FinishReason


@pytest.mark.slow
@pytest.mark.parametrize("finish_reason", [None, FinishReason.LENGTH])
def test_an_event_has_the_fields_of_vllm_and_the_weight_version(finish_reason: FinishReason | None) -> None:
    """An event has vLLM's fields in vLLM's order, followed by the weight version."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionLogProb,
        ChatCompletionLogProbs,
        ChatCompletionLogProbsContent,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateResponseStreamChoice,
        GenerateStreamResponse,
    )

    top = ChatCompletionLogProb(token="token_id:77", logprob=-1.5)
    content = ChatCompletionLogProbsContent(token="token_id:77", logprob=-1.5, top_logprobs=[top])
    logprobs = ChatCompletionLogProbs(content=[content])
    choice = GenerateResponseStreamChoice(index=0, logprobs=logprobs, finish_reason=finish_reason, token_ids=[77])
    body = GenerateStreamResponse(request_id="k", choices=[choice])
    text = body.model_dump_json(exclude={"prompt_token_ids", "mm_placeholders"})
    assert event("k", (77, -1.5, finish_reason)).decode() == f'data: {text[:-1]},"weight_version":0}}\n\n'


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
    assert len(await turn([FixedTransport("a"), FixedTransport("b")], (3, 5), 0)) == 2
    with pytest.raises(RuntimeError, match="3x5"):
        await turn([FixedTransport("a"), FixedTransport("b", **said)], (3, 5), 0)


async def test_too_few_tokens_end_the_bench() -> None:
    """The bench fails if tokens are missing, also if all transports agree."""
    with pytest.raises(RuntimeError, match="3x6"):
        await turn([FixedTransport("a"), FixedTransport("b")], (3, 6), 0)


def test_rates_and_cpu_are_per_token_and_compared_within_a_round() -> None:
    """Rates and CPU are per token, and are compared within a round."""
    a = {"seconds": 2.0, "tokens": 1000, "chunks": 10, "cpu_s": {"worker": 0.5, "client": 0.25, "nats": 0.25}}
    b = {"seconds": 8.0, "tokens": 1000, "chunks": 1000, "cpu_s": {"worker": 3.0, "client": 1.0}}
    assert (rate(a), cpu_ms(a)) == (500.0, 1000.0)
    made = row("rollbus", (10, 100), [{"rollbus": a, "sse": b}])
    assert made["times_sse"] == Spread(4, 4, 4)
    assert made["share_of_sse_cpu"] == Spread(0.25, 0.25, 0.25)
    assert made["client_cpu_ms"] == Spread(250, 250, 250)
    assert "nats_cpu_ms" not in row("sse", (10, 100), [{"rollbus": a, "sse": b}])
