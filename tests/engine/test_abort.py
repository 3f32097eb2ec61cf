"""An aborted request ends once, in order, with all steps that the engine reported before."""

import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt, rows_here
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm

LONG = GenerateRequest(prompt_token_ids=prompt(50, seed=60), sampling=SamplingParams(max_tokens=400, ignore_eos=True))


def test_abort_ends_a_running_request(moe: RunningEngine) -> None:
    """After an abort, the engine reports one step with finish reason ABORT and nothing more.

    The rows are those of the reported tokens.
    """

    async def scenario() -> tuple[Result, list[RequestStep]]:
        key, other = await moe.add(LONG), await moe.add(LONG)
        result = Result()
        while len(result.steps) < 5:
            result.steps.extend(step for step in await moe.next() if step.key == key)
        await moe.engine.abort([key])
        await moe.engine.abort([key, "unknown"])
        rest: list[RequestStep] = []
        is_other_open = True
        while is_other_open:
            for step in await moe.next():
                if step.key == key:
                    rest.append(step)
                elif step.key == other and step.finish_reason is not None:
                    is_other_open = False
        result.steps.extend(rest)
        return result, rest

    result, rest = moe.call(scenario())

    assert [step.finish_reason for step in rest].count(FinishReason.ABORT) == 1
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert len(result.rows) == rows_here(50 + len(result.token_ids) - 1)


def test_abort_before_the_first_token(moe: RunningEngine) -> None:
    """A request that is aborted immediately ends with no tokens and no rows, and its key is free again."""

    async def scenario() -> list[Result]:
        results = []
        for _ in range(3):
            await moe.engine.add("same-key", LONG)
            await moe.engine.abort(["same-key"])
            results.append((await moe.finish("same-key"))["same-key"])
        return results

    for result in moe.call(scenario()):
        assert len(result.steps) == 1
        assert result.last.finish_reason is FinishReason.ABORT
        assert result.token_ids == []
        assert len(result.rows) == 0
        assert result.last.routed_experts_start == 0


def test_abort_of_a_finished_request_is_ignored(moe: RunningEngine) -> None:
    """A request that ends before its abort arrives keeps its own finish reason."""
    short = GenerateRequest(prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1))

    async def scenario() -> tuple[Result, Result]:
        key = await moe.add(short)
        first = (await moe.finish(key))[key]
        await moe.engine.abort([key])
        again = await moe.add(short)
        return first, (await moe.finish(again))[again]

    first, after = moe.call(scenario())

    assert first.last.finish_reason is not FinishReason.ABORT
    assert len(after.steps) == 1
