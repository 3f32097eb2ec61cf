"""A session of many turns and tokens: what a turn costs does not grow with the turns before it."""

from typing import Any

import pytest

from rollbus.frontend.http.sessions.store import SessionStore
from rollbus.frontend.sessions import tree
from rollbus.frontend.tokenization import Tokenizer
from tests.sessions.support import Serving, agent_of, replace_context

TURNS = 30


@pytest.mark.slow
async def test_turns_tokenize_and_store_each_message_once(
    serve: Serving, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that is tokenized and the bytes that are stored grow with the tokens, not with turns times tokens."""
    encoded, stored = 0, 0
    encode, put = Tokenizer.encode, SessionStore.put

    def count_text(self: Tokenizer, text: str, **options: Any) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(self, text, **options)

    async def count_bytes(self: SessionStore, session: str, name: str, data: bytes) -> int:
        nonlocal stored
        stored += len(data)
        return await put(self, session, name, data)

    monkeypatch.setattr(Tokenizer, "encode", count_text)
    monkeypatch.setattr(SessionStore, "put", count_bytes)
    # Ids decide only between branches. A call would fail the turn.
    monkeypatch.setattr(tree, "call_ids", None)
    writes += ["It is " + "so " * 10] * TURNS
    async with serve(config=replace_context(1 << 17)) as (_, owner):
        session = await owner.open()
        history: list[Any] = []
        async with agent_of(session) as agent:
            for turn in range(TURNS):
                history.append({"role": "user", "content": f"{turn} " + "and " * 210})
                answer = await agent.chat.completions.create(model="synthetic", messages=history)
                history.append(answer.choices[0].message.model_dump(exclude_none=True))
        (sample,) = await owner.samples(session, rows=False)
    assert (size := len(sample["token_ids"])) > 25_000
    assert sample["joins"].count("checked") == 5
    # The engine's text of the answers is encoded by the test, and a probe for each turn by the template.
    assert encoded < 2 * size
    assert stored < 25 * size
