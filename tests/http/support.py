"""The HTTP service on a free port, with workers on the synthetic engine or a real engine."""

import asyncio
import base64
import contextlib
import functools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import rollbus
from rollbus import Chunk
from rollbus.frontend import tokenization
from rollbus.frontend.http import Settings
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.docs import document
from rollbus.frontend.http.server import listen, serving
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.control.support import write_adapter, write_checkpoint
from tests.support.fleet import synthetic_worker, until_state
from tests.support.requests import greedy, start_stream
from tests.support.waits import HANGS_AFTER_S


@dataclass
class Http:
    """A running service."""

    url: str
    """The URL, without a slash at the end."""
    client: httpx.AsyncClient
    """An HTTP client with the URL of the service as its base."""
    rb: rollbus.Client
    """A client of the same fleet, separate from the service's client."""
    own: rollbus.Client
    """The service's client."""
    engine: SyntheticEngine | None = None
    """The engine of the only worker, if it is synthetic."""


@functools.cache
def _declared() -> dict[tuple[str, str], set[str]]:
    """Return the statuses in the OpenAPI document, by method and path."""
    paths = document(OPEN, DATA, ADMIN, Settings())["paths"]
    return {
        (method.upper(), path): set(operation["responses"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


async def _check_declared(answer: httpx.Response) -> None:
    """Check for each response of any test that the OpenAPI document lists the status for the route."""
    path = re.sub(r"/(operations|models|requests)/.+$", r"/\1/{id}", answer.request.url.path)
    path = re.sub(r"/(loras|assets)/.+$", r"/\1/{name}", path)
    path = re.sub(r"/sessions/[^/]+", "/sessions/{session}", path)
    # Each GET route also has HEAD, which the document does not list.
    method = "GET" if answer.request.method == "HEAD" else answer.request.method
    statuses = _declared().get((method, path), {"404", "405"})
    status = str(answer.status_code)
    assert not statuses.isdisjoint({status, f"{status[0]}XX"}), (method, path, status)


@contextlib.asynccontextmanager
async def http_before(nats_url: str, fleet: str, settings: Settings | None = None) -> AsyncIterator[Http]:
    """Serve a fleet whose workers run elsewhere."""
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    settings = settings or Settings()
    async with (
        rollbus.connect(nats_url, fleet=fleet, tracing=settings.otel) as own,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        serving(own, settings, listening),
        httpx.AsyncClient(
            base_url=url,
            verify=False,
            # Tests that encode bodies themselves need this header. For other bodies, httpx sets it.
            headers={"Content-Type": "application/json"},
            timeout=HANGS_AFTER_S,
            event_hooks={"response": [_check_declared]},
        ) as client,
    ):
        yield Http(url, client, rb, own)


@contextlib.asynccontextmanager
async def http_service(
    nats_url: str,
    fleet: str,
    settings: Settings | None = None,
    *,
    config: SyntheticConfig | None = None,
    **worker: object,
) -> AsyncIterator[Http]:
    """Serve a fleet of one synthetic worker."""
    async with (
        synthetic_worker(nats_url, fleet, config=config, **worker) as (_, engine),  # type: ignore[arg-type]
        http_before(nats_url, fleet, settings) as http,
    ):
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers()
        http.engine = engine
        yield http


def noted_requests(monkeypatch: pytest.MonkeyPatch) -> list[rollbus.GenerateRequest]:
    """Return a list that records the requests to the bus that are not streamed."""
    wanted: list[rollbus.GenerateRequest] = []
    complete = rollbus.Client.complete

    async def note(client: rollbus.Client, request: rollbus.GenerateRequest, **options: Any) -> rollbus.Generation:
        wanted.append(request)
        return await complete(client, request, **options)

    monkeypatch.setattr(rollbus.Client, "complete", note)
    return wanted


async def by_bus(rb: rollbus.Client, prompt: list[int], start: int = 0, **sampling: Any) -> rollbus.Generation:
    """Return the generation of a prompt without HTTP."""
    request = rollbus.GenerateRequest(
        prompt_token_ids=prompt, sampling=rollbus.SamplingParams(**sampling), routed_experts_prompt_start=start
    )
    return await rb.complete(request)


def rows_of(routed: dict[str, Any]) -> np.ndarray:
    """Return the rows in a response."""
    data = base64.b64decode(routed["data"], validate=True)
    return np.frombuffer(data, routed["dtype"]).reshape(routed["shape"])


# Tokenizers of a few hundred tokens, one for each family of models.


SPECIAL = "<|end|>"
ROLE = "<|role|>"
"""A special token that the configuration does not name."""
ADDED = "<tool▁call>"
"""An added token that is not special, with a character that byte-level vocabularies do not contain."""
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "{% for tool in tools or [] %}({{ tool.function.name }}{{ tool.function.x }}){% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opening }}{% endif %}"
)


@functools.cache
def byte_level() -> tokenization.Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen: all bytes are tokens, and some texts."""
    # transformers, with which tests/http/test_tokenizers.py compares the fast one, takes five seconds to import.
    return loaded(make_byte_level(), tokenization.load_fast_tokenizer)


def make_byte_level() -> Tokenizer:
    """Return the byte-level tokenizer in a form that can be saved."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ð", "Ł"), ("ł", "Ģ")]
    vocabulary = {token: index for index, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_fallback() -> tokenization.Tokenizer:
    """Return a tokenizer like those of Llama 2 and Gemma: pieces of text, and bytes for all other text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "é", "th", "the", "▁the"]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return loaded(tokenizer)


@functools.cache
def word_piece() -> tokenization.Tokenizer:
    """Return a tokenizer like that of BERT, whose decoder adds the spaces."""
    vocabulary = {token: index for index, token in enumerate(["[UNK]", "the", "##re", "cat", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return loaded(tokenizer)


def loaded(tokenizer: Tokenizer, load: Any = tokenization.load_tokenizer) -> tokenization.Tokenizer:
    """Return a tokenizer as `load` reads it from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        read: tokenization.Tokenizer = load(save(tokenizer, Path(folder)))
        return read


def save(tokenizer: Tokenizer, folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer in the layout of a checkpoint, with two special tokens and one other added token."""
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (SPECIAL, ROLE)])
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL, "chat_template": chat_template}
    # Clean-up would remove spaces.
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": True}))
    return folder


# Helpers for the tests of the OpenAI routes.


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONFIG = SyntheticConfig(vocab_size=264, eos_token_id=262, max_model_len=512)
"""The model may generate each token of the tokenizer."""


def client_of(http: Http) -> Any:
    """Return the OpenAI client without retries, which would hide failures.

    Its type is Any because of rollbus's extra fields.
    """
    return openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0)


@contextlib.asynccontextmanager
async def talking(
    nats_url: str, fleet: str, folder: Path, config: SyntheticConfig = CONFIG
) -> AsyncIterator[tuple[Http, Any]]:
    """Serve a synthetic model with a byte tokenizer. Yield the service and a client of it."""
    settings = Settings(tokenizer=save(make_byte_level(), folder))
    async with http_service(nats_url, fleet, settings, config=config) as http, client_of(http) as client:
        yield http, client


# Fleets of synthetic workers with the HTTP service, and checkpoints and adapters for them.


T = TypeVar("T")
Serve = Callable[..., contextlib.AbstractAsyncContextManager[Http]]
Talk = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Http, Any]]]
STEP_S = 0.002


@dataclass
class ControlHttp:
    """A service, and its workers `w0`, `w1` ..."""

    http: Http
    engines: list[SyntheticEngine]
    root: Path
    """The folder with the checkpoints `one` (loaded at start) and `two`, and with `adapter`."""

    async def post(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send a JSON body, or none. Return status and JSON of the response."""
        answer = await self.http.client.post(path, json=body)
        return answer.status_code, answer.json()

    async def told(self, path: str, state: WorkerState) -> httpx.Response:
        """Return the response after the service has received presence of all workers in a state.

        Acks and presence arrive on different subjects, so a worker's presence may be older than its ack.
        """
        await until_state(self.http.own, lambda fleet: {worker.state for worker in fleet.workers} == {state})
        return await self.http.client.get(path)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a response."""
        answer = await self.http.client.get(path)
        return answer.status_code, answer.json()


Control = Callable[..., contextlib.AbstractAsyncContextManager[ControlHttp]]


async def together(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Run these calls concurrently, because a command to a fleet takes half a second."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(call) for call in calls]
    return [task.result() for task in running]


@contextlib.asynccontextmanager
async def control_http(
    nats_url: str,
    fleet: str,
    tmp_path: Path,
    count: int = 1,
    settings: Settings | None = None,
    *,
    models: tuple[str, ...] = (),
) -> AsyncIterator[ControlHttp]:
    """Serve synthetic workers at version 1: `count` workers of model `synthetic`, or one for each of `models`."""
    root = tmp_path / "root"
    one = write_checkpoint(root / "one", seed=1)
    write_checkpoint(root / "two", seed=2)
    write_adapter(root / "adapter")
    config = SyntheticConfig(step_s=STEP_S, prefix_cache=True)
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for i, model in enumerate(models or ("synthetic",) * count):
            fields: dict[str, Any] = {
                "worker_id": f"w{i}",
                "model_path": str(one),
                "weight_roots": (str(root),),
                "weight_version": 1,
                "cache_dir": str(tmp_path / "cache"),
            }
            worker = synthetic_worker(nats_url, fleet, config=config, model=model, **fields)
            engines.append((await stack.enter_async_context(worker))[1])
        http = await stack.enter_async_context(http_before(nats_url, fleet, settings))
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers(len(engines))
        yield ControlHttp(http, engines, root)


@contextlib.asynccontextmanager
async def in_flight(http: Http, max_tokens: int = 60_000) -> AsyncIterator[list[Chunk]]:
    """Run a request that would last for minutes. Yield its chunks, and abort the request at the end."""
    async with asyncio.TaskGroup() as tasks:
        stream = await start_stream(tasks, http.rb, greedy(1, max_tokens))
        yield stream.chunks
        stream.reading.cancel()
