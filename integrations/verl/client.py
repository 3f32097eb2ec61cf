"""What verl's own clients forget and a fleet needs: the session of a turn, and the steps of a resumed sample.

verl gives each turn a new id, and `FullyAsyncLLMServerClient` takes the step of a sample's first call as its lowest and
that of its last call as its highest step, although the tokens of one call may span an update. Both clients are extended
for rollouts named `rollbus`, and unchanged for all others.
"""

from contextvars import ContextVar
from typing import Any

from .outputs import SEPARATOR, merge_legs

Legs = list[tuple[int, dict[str, Any]]]
_LEGS: ContextVar[Legs | None] = ContextVar("rollbus_verl_legs", default=None)
"""Calls of the sample that the present task generates. None outside a resuming client."""


def extend_clients() -> None:
    """Extend verl's clients in this process. A second call has no effect."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    if getattr(LLMServerClient, "rollbus_extended", False):
        return
    new_id, generate_once = LLMServerClient._vllm_request_id, LLMServerClient.generate
    generate_resumed = FullyAsyncLLMServerClient.generate

    def request_id_with_session(self: Any, request_id: str) -> str:
        turn = new_id(self, request_id)
        return f"{request_id}{SEPARATOR}{turn}" if _is_ours(self) else turn

    async def generate_leg(self: Any, request_id: Any, **options: Any) -> Any:
        output = await generate_once(self, request_id, **options)
        legs = _LEGS.get()
        if legs is not None:
            legs.append((len(output.token_ids), dict(output.extra_fields)))
        return output

    async def generate_whole(self: Any, request_id: Any, **options: Any) -> Any:
        if not _is_ours(self):
            return await generate_resumed(self, request_id, **options)
        legs: Legs = []
        token = _LEGS.set(legs)
        try:
            output = await generate_resumed(self, request_id, **options)
        finally:
            _LEGS.reset(token)
        output.extra_fields.update(merge_legs(legs))
        return output

    LLMServerClient._vllm_request_id = request_id_with_session
    LLMServerClient.generate = generate_leg
    FullyAsyncLLMServerClient.generate = generate_whole
    LLMServerClient.rollbus_extended = True


def _is_ours(client: Any) -> bool:
    return bool(client.config.actor_rollout_ref.rollout.name == "rollbus")
