"""The parsed parts of a chat's answers, selected by the request and written in OpenAI's format."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .... import bus
from .body import ChatBody
from .parsers import AnswerParts, AnswerReader, CallPart, ParsePlan, ToolQuestion

__all__ = ["Reading", "parts_json"]


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsing of the answers to one chat."""

    body: ChatBody
    question: ToolQuestion
    plan: ParsePlan

    def constrain(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling fields with the plan's constraint, which replaces a `response_format`, as in vLLM."""
        structure = self.plan.structured_outputs
        if structure is None:
            return sampling
        return {**sampling, "extra": {**(sampling["extra"] or {}), "structured_outputs": structure}}

    def reader(self, request: bus.GenerateRequest) -> AnswerReader:
        """Create the reader of one answer."""
        return AnswerReader(
            self.plan.answer_parser,
            self.question,
            np.asarray(request.prompt_token_ids).tolist(),
            show_reasoning=self.body.include_reasoning is not False,
            one_call=self.body.parallel_tool_calls is False,
        )


def parts_json(parts: AnswerParts, *, delta: bool) -> dict[str, Any]:
    """Return the `message` of an answer, or the `delta` of a stream."""
    fields: dict[str, Any] = {} if delta else {"role": "assistant", "refusal": None}
    if not delta or parts.content:
        # As in OpenAI's API, empty content is null if the answer has other parts.
        fields["content"] = parts.content or (None if parts else "")
    if parts.reasoning:
        # Clients of vLLM read `reasoning`. Clients of DeepSeek and other servers read `reasoning_content`.
        fields |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
    if parts.calls:
        fields["tool_calls"] = [_call_json(call, delta=delta) for call in parts.calls]
    return {"delta" if delta else "message": fields}


def _call_json(call: CallPart, *, delta: bool) -> dict[str, Any]:
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    found: dict[str, Any] = {"index": call.index} if delta else {}
    if call.id is not None:
        found |= {"id": call.id, "type": "function"}
    return {**found, "function": function}
