"""Fixtures that serve sessions, `async with serve() as (http, owner)`, and the texts that their workers write."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.workers.engines.synthetic.batch import SyntheticBatch
from tests.sessions.families import tokenizer_of
from tests.sessions.support import EOS, Serving, serving


@pytest.fixture
def serve(nats_url: str, fleet: str, tmp_path: Path) -> Serving:
    """Return `serving` for this test's fleet."""
    return functools.partial(serving, nats_url, fleet, tmp_path)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of texts of which each new request writes the next one, followed by the end of its turn."""
    texts: list[str] = []
    of_request: dict[str, tuple[list[int], int]] = {}

    def sample(batch: Any, choices: Any) -> Any:
        table = batch._table
        sampled = []
        for running, count in zip(batch._running, table["count"].tolist(), strict=True):
            request = running.request
            if request.request_id not in of_request:
                text = texts.pop(0) if texts else "Nothing."
                if "<think>" not in text and "<tool_call>" not in text:
                    # Without it, the parser takes the whole text for reasoning.
                    text = f"<think>\n\n</think>\n\n{text}"
                ids = [*tokenizer_of("qwen3").encode(text, add_special_tokens=False), EOS]
                of_request[request.request_id] = ids, request.prompt_len
            # A later attempt has the tokens so far in its prompt.
            ids, before = of_request[request.request_id]
            sampled.append(ids[min(int(count) + request.prompt_len - before, len(ids) - 1)])
        found = np.array(sampled, np.uint64)
        table["last"][:] = found
        table["count"] += np.uint64(1)
        return found

    monkeypatch.setattr(SyntheticBatch, "_sample", sample)
    return texts
