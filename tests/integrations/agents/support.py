"""A service whose model writes given texts, by a grammar, and the check of what comes out of a session.

A model with random weights does not call tools. So a grammar is added to each request to the engine, which allows only
the text of the agent's turn. The engine samples this text, and everything after it is as for any model. Nearly every
text can be written with many sequences of tokens, and the engine samples one of them. A bias lets it write each mark of
calls and reasoning as one token.
"""

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http.openai import routes
from rollbus.frontend.http.openai.body import ChatBody
from tests.http.support import Http, http_before, rows_of
from tests.integrations.environments import TOKENS, token_id
from tests.sessions.families import TEMPLATES
from tests.support.noted_steps import Sampled, read_notes, sampled_of
from tests.support.real_fleet import RealWorkers
from tests.support.second_pass import check_second_pass

TURNS = 5
ANSWER = "The sum is 5."
WANTED: ContextVar[str] = ContextVar("wanted")
END = 2
"""The token that ends a turn."""
BIAS = 100.0
"""Of the tokens of `TOKENS`. vLLM's parsers of streams know these marks only as one token each."""


def text_of_turn(body: ChatBody) -> str:
    """Return what the model writes next: reasoning, and a call of the tool that the agent offers or its answer.

    The texts of the turns differ in what agents and templates change: blanks, and text before a call.
    """
    turn = sum(message["role"] == "assistant" for message in body.messages or ())
    names = {tool["function"]["name"]: tool["function"] for tool in body.tools or ()}
    call: tuple[str, dict[str, Any]]
    thought = f"<think>\nTurn {turn}.\n</think>\n\n"
    if "bash" in names:
        last = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{ANSWER}'"
        call = ("bash", {"command": f"echo {turn + 1} | tee -a sums" if turn < TURNS else last})
    elif turn < TURNS and "echo_back" in names:
        call = ("echo_back", {"message": f"turn {turn}"})
    elif turn < TURNS:
        call = ("add", {"a": turn, "b": 1})
    elif "final_answer" in names:
        call = ("final_answer", {"answer": ANSWER})
    else:
        return thought + ANSWER
    separators = (", ", ": ") if turn % 2 else (",", ":")
    written = json.dumps({"name": call[0], "arguments": call[1]}, separators=separators)
    return f"{thought}{'I add 1. ' if turn % 2 else ''}<tool_call>{written}</tool_call>"


def save_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint's tokenizer with a template that renders calls. With its own, every turn would be a branch."""
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    config["chat_template"] = (TEMPLATES / "qwen3.jinja").read_text().removesuffix("\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class NotedWorkers:
    """Workers of one checkpoint that note what they sample."""

    nats_url: str
    checkpoint: Path
    notes: Path
    """Folder of the notes."""
    workers: RealWorkers


@contextmanager
def noted_workers(nats_url: str, checkpoint: Path, folder: Path) -> Iterator[NotedWorkers]:
    """Yield a fleet without workers so far, whose workers note what they sample, and kill them in the end."""
    workers = RealWorkers(nats_url, checkpoint, version=0, cache=folder / "cache")
    workers.notes = folder / "notes"
    workers.notes.mkdir()
    try:
        yield NotedWorkers(nats_url, checkpoint, workers.notes, workers)
    finally:
        workers.kill()


@dataclass
class Forced:
    """A service of which the engine may sample only the text of each turn."""

    http: Http
    noted: NotedWorkers
    before_turn: Callable[[], Awaitable[object]] | None = None
    """Is awaited before the request of a turn is made."""
    texts: dict[str, str] = field(default_factory=dict)
    """The text of each request, by its id."""

    async def open(self) -> tuple[dict[str, Any], str]:
        """Open a session. Return it, and the URL for agents that add `/v1`."""
        answer = await self.http.client.post("/v1/rl/sessions", json={"routed_experts": True})
        session = answer.json()
        return session, session["base_url"].removesuffix("/v1")

    async def check_session(self, session: dict[str, Any], *, is_branch: bool = True, attempts: int = 1) -> None:
        """Assert that a session has `TURNS + 1` turns with what the engine sampled, token by token and row by row.

        A second forward pass over each sample gives the same log probabilities and routed experts.

        Args:
            is_branch: False: the agent writes its history anew in each turn, so that each turn is a sample.
            attempts: number of attempts of each turn.
        """
        path = f"/v1/rl/sessions/{session['id']}"
        read = (await self.http.client.get(path)).json()
        samples = (await self.http.client.get(f"{path}/samples")).json()["samples"]
        assert sorted(turn for sample in samples for turn in sample["turns"]) == sorted(
            turn["id"] for turn in read["turns"]
        )
        assert len(read["turns"]) == TURNS + 1
        if is_branch:
            (sample,) = samples
            assert sample["forks"] == [None] * (TURNS + 1)
            assert sample["joins"][:-1] == ["whole", "checked", "tail", "checked", "tail"]
        requests, notes = {turn["id"]: turn["request_id"] for turn in read["turns"]}, read_notes(self.noted.notes)
        for sample in samples:
            assert sample["attempts"] == [attempts] * len(sample["turns"])
            of_turns = [requests[turn] for turn in sample["turns"]]
            found = [sampled_of(notes[request]) for request in of_turns]
            allowed: dict[int, list[int]] = {}
            for request, noted in zip(of_turns, found, strict=True):
                sampled = noted.token_ids[noted.num_prompt :]
                allowed |= _allowed(self.noted.checkpoint, self.texts[request], sampled, noted.num_prompt)
            check_sample(sample, found)
            rows = rows_of(sample["routed_experts"])
            check_second_pass(self.noted.checkpoint, sample, rows, allowed, _biases(self.noted.checkpoint))


def check_sample(sample: dict[str, Any], found: list[Sampled]) -> None:
    """Assert that a sample of version 0 has what the engines sampled in its turns."""
    ids, mask = np.array(sample["token_ids"], np.int32), np.array(sample["loss_mask"])
    places, logprobs = np.array(sample["turn_of_token"]), np.array(sample["logprobs"], np.float32)
    rows, end = rows_of(sample["routed_experts"]), 0
    for place, noted in enumerate(found):
        begin, end = max(end - 1, 0), len(noted.token_ids)
        own = (places == place) & mask
        assert ids[:end].tolist() == noted.token_ids
        assert np.flatnonzero(own).tolist() == list(range(noted.num_prompt, end))
        assert np.array_equal(logprobs[own], noted.logprobs)
        # The first row of a turn is that of the last token before it.
        assert noted.rows_start == begin
        assert np.array_equal(rows[begin : end - 1], noted.rows)
    assert (end, end - 1) == (len(ids), len(rows))
    assert np.array_equal(np.array(sample["weight_versions"]), np.where(mask, 0, -1))


def _biases(checkpoint: Path) -> dict[int, float]:
    return {token_id(checkpoint, token): BIAS for token in TOKENS}


@functools.cache
def _bytes_of_tokens(checkpoint: Path) -> list[bytes]:
    """Return the bytes of each token, by id."""
    data = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {token["content"] for token in data["added_tokens"]}
    letters = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    return [token.encode() if token in added else _bytes_of(token) for token in letters]


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, in which each byte is a printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return bytes(table[letter] for letter in token)


def _allowed(checkpoint: Path, text: str, sampled: list[int], begin: int) -> dict[int, list[int]]:
    """Return the tokens that the grammar of a text allows, by the position of each sampled token.

    Those are the tokens that begin what is left of the text, and after the text its end.
    """
    tokens, rest = _bytes_of_tokens(checkpoint), text.encode()
    found = {}
    for position, token in enumerate(sampled, begin):
        found[position] = (
            [each for each, data in enumerate(tokens) if data and rest.startswith(data)] if rest else [END]
        )
        assert token in found[position]
        rest = rest.removeprefix(tokens[token]) if rest else rest
    assert not rest
    assert sampled[-1] == END
    return found


@asynccontextmanager
async def forced(noted: NotedWorkers, monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[Forced]:
    """Serve a fleet whose engines may sample only the text of each turn."""
    chat_route: Any = routes
    prepare_answer, build_request = chat_route.prepare_answer, chat_route.build_request

    async def note_turn(service: Any, request: Any, body: ChatBody, *more: Any) -> Any:
        WANTED.set(text_of_turn(body))
        if served.before_turn is not None:
            await served.before_turn()
        return await prepare_answer(service, request, body, *more)

    def force(*given: Any, sampling: Any, **more: Any) -> rollbus.GenerateRequest:
        fields = sampling if isinstance(sampling, Mapping) else asdict(sampling)
        grammar = f"root ::= {json.dumps(WANTED.get())}"
        extra = {**(fields.get("extra") or {}), "structured_outputs": {"grammar": grammar}}
        fields = {**fields, "extra": extra, "logit_bias": _biases(noted.checkpoint)}
        request: rollbus.GenerateRequest = build_request(*given, sampling=fields, **more)
        served.texts[request.request_id] = WANTED.get()
        return request

    monkeypatch.setattr(routes, "prepare_answer", note_turn)
    monkeypatch.setattr(routes, "build_request", force)
    settings = Settings(
        tool_call_parser="hermes", reasoning_parser="qwen3", tokenizer=save_tokenizer(noted.checkpoint, folder)
    )
    async with http_before(noted.nats_url, noted.workers.fleet, settings) as http:
        await http.own.fleet.wait_for_workers()
        served = Forced(http, noted)
        yield served
