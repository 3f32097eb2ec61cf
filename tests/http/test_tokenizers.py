"""The package tokenizers alone gives the ids of transformers, or is not used."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http import text as loads_module
from rollbus.frontend.http.app import ADMIN, DATA
from rollbus.frontend.http.body import STRICT, decode_body
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.text import TokenizerLoads
from rollbus.frontend.tokenization import (
    PROVEN_MODELS,
    Tokenizer,
    TokenizerUnavailable,
    load_fast_tokenizer,
    load_tokenizer,
)
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.cli.support import ENV
from tests.http.support import (
    ADDED,
    CHAT_TEMPLATE,
    COMPLETIONS,
    ROLE,
    SPECIAL,
    Http,
    Serve,
    byte_level,
    make_byte_level,
    save,
)
from tests.support.fleet import until_idle
from tests.support.waits import SOON_S, until_true

pytestmark = pytest.mark.slow
TEXTS = ("the théâtre 🙂", f"{SPECIAL}the {ROLE}\n\n the{ADDED}x", " the  the", "\x00\u200b", "")
MESSAGES = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "thé", "tool_calls": None}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def configure(folder: Path, **fields: Any) -> None:
    """Set fields of the configuration of a tokenizer. None removes a field."""
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def add_beginning(folder: Path) -> None:
    """Make the tokenizer put a special token before each text, as that of Llama 3."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{ROLE} $A", special_tokens=[(ROLE, backend.token_to_id(ROLE))]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_token=SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token=ROLE, pad_token=SPECIAL)


def assert_equal(folder: Path) -> None:
    """Check that both packages give the same ids, texts and prompts of chats."""
    fast, slow = load_fast_tokenizer(folder), load_tokenizer(folder)
    assert isinstance(fast, Tokenizer), fast
    for text in TEXTS:
        for special in (True, False):
            assert fast.encode(text, add_special_tokens=special) == slow.encode(text, add_special_tokens=special)
        ids = slow.encode(text)
        for special in (True, False):
            assert fast.decode(ids, skip_special_tokens=special) == slow.decode(ids, skip_special_tokens=special)
        assert fast.tokens(ids) == slow.tokens(ids)
    assert fast.special_ids == slow.special_ids
    for options in (
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"opening": "x"}},
    ):
        assert fast.apply_chat_template(MESSAGES, **options) == slow.apply_chat_template(MESSAGES, **options)


@pytest.mark.parametrize("model", [*PROVEN_MODELS])
def test_ids_are_equal_to_those_of_transformers(tmp_path: Path, model: str | None) -> None:
    """For each type of model for which tokenizers is used alone, ids and texts equal those of transformers."""
    save(make_byte_level(), tmp_path)
    add_beginning(tmp_path)
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))

    assert_equal(tmp_path)


def test_a_saved_tokenizer_is_loaded_without_transformers(tmp_path: Path) -> None:
    """A tokenizer that transformers has saved is used too, with its added tokens and its template in a file."""
    load_tokenizer(save(make_byte_level(), tmp_path)).wrapped.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    (tmp_path / "saved" / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<assistant>", "<bot>"))

    assert_equal(tmp_path / "saved")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, "its class is Qwen2Tokenizer"),
        ({"tokenizer_class": None}, "its class is None"),
        ({"add_bos_token": False}, "its configuration sets add_bos_token"),
        ({"add_eos_token": True}, "its configuration sets add_eos_token"),
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "its configuration sets auto_map"),
        ({"eos_token": "<other>"}, "its configuration has special tokens that its tokenizer.json lacks"),
        ({"eos_token": ADDED}, "its configuration has special tokens that its tokenizer.json lacks"),
        ({"added_tokens_decoder": {}}, "its files differ in added tokens"),
        ({"chat_template": [{"name": "default", "template": ""}]}, "it has several chat templates"),
    ],
)
def test_an_unproven_tokenizer_is_left_to_transformers(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    """A class of its own, a setting of BOS or EOS, or files that differ are reasons to use transformers."""
    configure(save(make_byte_level(), tmp_path), **fields)

    assert load_fast_tokenizer(tmp_path) == reason


def test_a_directory_without_a_proven_tokenizer_gives_the_reason(tmp_path: Path) -> None:
    """A missing file, an unknown type of model and a broken file are reasons, not errors."""
    assert load_fast_tokenizer(tmp_path) == "it has no tokenizer_config.json"
    save(make_byte_level(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    assert load_fast_tokenizer(tmp_path) == "its model is gemma"
    (tmp_path / "config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert load_fast_tokenizer(tmp_path) == "it has a special_tokens_map.json"
    (tmp_path / "special_tokens_map.json").unlink()
    backend = make_byte_level()
    backend.enable_padding()
    save(backend, tmp_path)
    assert load_fast_tokenizer(tmp_path) == "its tokenizer.json names a token for padding"
    (tmp_path / "tokenizer.json").write_text("{")
    assert "JSONDecodeError" in str(load_fast_tokenizer(tmp_path))


# Tokenizers that cannot be loaded, or whose load hangs. The service serves all other requests and can stop.


TEXT = {"prompt": "a", "max_tokens": 1}


async def test_a_malformed_tokenizer_gives_501_until_the_files_are_repaired(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that raises a `TypeError` gives 501 for text until the files are repaired, and is logged once."""
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", SOON_S)
    (tmp_path / "config.json").write_text("[1]")
    async with serve(Settings(tokenizer=tmp_path)) as http:
        for _ in range(2):
            assert (await http.client.get("/ready")).status_code == 200
        answer = await http.client.post(COMPLETIONS, json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_tokenizer")
        assert f"no tokenizer in {tmp_path}" in answer.json()["error"]["message"]
        (tmp_path / "config.json").unlink()
        save(make_byte_level(), tmp_path)
        assert (await http.client.post(COMPLETIONS, json=TEXT)).status_code == 200

    [logged] = [line for line in caplog.messages if line.startswith("tokenizer.")]
    assert logged.startswith(f"tokenizer.load_failed error=no tokenizer in {tmp_path}")


async def test_a_rust_panic_fails_only_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Rust panic, which is no `Exception`, fails only the load. Only a request repeats a failed load."""
    loads, panics = TokenizerLoads(), [True, True]

    class Panic(BaseException):
        """A panic as pyo3 raises it."""

    def load(_folder: Path) -> Tokenizer:
        if panics:
            panics.pop()
            raise Panic("index out of bounds")
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    for _ in range(3):
        while not await loads.has_ended(tmp_path):
            pass
    with pytest.raises(TokenizerUnavailable, match="a library failed"):
        await loads.tokenizer(tmp_path)
    assert await loads.tokenizer(tmp_path) is byte_level()
    assert caplog.messages.count(f"tokenizer.load_panicked folder={tmp_path}") == 2


async def test_the_number_of_kept_tokenizers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, the tokenizer used least recently is loaded again, and no thread begins while all load."""
    loaded: list[str] = []
    may_end = threading.Event()

    def load(folder: Path) -> Tokenizer:
        loaded.append(folder.name)
        assert folder.name != "hangs" or may_end.wait(SOON_S)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "MAX_LOADS", 2)
    loads = TokenizerLoads()
    for name in ("a", "b", "a", "c", "a", "b"):
        await loads.tokenizer(tmp_path / name)
    assert loaded == ["a", "b", "c", "b"]

    loads, begun = TokenizerLoads(), len(loaded)
    async with asyncio.TaskGroup() as tasks:
        for name in ("hangs", "waits"):
            tasks.create_task(loads.tokenizer(tmp_path / name))
        await until_true(lambda: len(loaded) > begun)
        with pytest.raises(TokenizerUnavailable, match="2 other tokenizers are being loaded"):
            await loads.tokenizer(tmp_path / "more")
        may_end.set()
    assert loaded[begun:] == ["hangs", "waits"]


async def test_a_service_stops_while_a_load_hangs(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service waits for a hanging load only up to its limit, and starts no further load."""
    may_end, begun = threading.Event(), []

    def load(folder: Path) -> Tokenizer:
        begun.append(folder)
        may_end.wait()
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", 0.05)
    monkeypatch.setattr(loads_module, "STOP_WAIT_S", 0.05)
    loads = TokenizerLoads()
    try:
        async with asyncio.timeout(SOON_S):
            async with serve(Settings(tokenizer=tmp_path)) as http:
                assert (await http.client.get("/ready")).status_code == 503
            for name in "ab":
                assert not await loads.has_ended(tmp_path / name)
            await loads.stop()
    finally:
        may_end.set()
    await asyncio.to_thread(_join_loads)
    assert begun == [tmp_path, tmp_path / "a"]


def _join_loads() -> None:
    for thread in threading.enumerate():
        if thread.name == "tokenizer-load":
            thread.join(SOON_S)


HANGS = """
import asyncio, pathlib, threading
from rollbus.frontend.http import text

text.load_tokenizer = lambda folder: threading.Event().wait()
text.PRELOAD_WAIT_S = text.STOP_WAIT_S = 0.01

async def main():
    loads = text.TokenizerLoads()
    assert not await loads.has_ended(pathlib.Path("/a"))
    await loads.stop()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_process_ends_while_a_load_hangs() -> None:
    """A hanging load does not keep the process alive."""
    subprocess.run([sys.executable, "-P", "-c", HANGS], env=ENV, timeout=SOON_S, check=True)


# Wrong input to each route gives 4xx with the field, and leaves no request in the engine.


BASES: dict[str, dict[str, Any]] = {
    "GenerateBody": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "ChatBody": {"model": "synthetic", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "CompletionBody": {"model": "synthetic", "prompt": [1, 2], "max_tokens": 1},
    "TokenizeBody": {"prompt": "the"},
    "DetokenizeBody": {"tokens": [1]},
    "InitTransferBody": {"init_info": {}},
    "AddLoraBody": {"lora_name": "x", "source": {"uri": "file:///x"}},
    "AbortBody": {"request_ids": ["x"]},
    "ResponsesBody": {"input": "the"},
    "MessagesBody": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "CountTokensBody": {"messages": [{"role": "user", "content": "the"}]},
    "RewardBody": {"reward": 1.0},
    "SkyrlBody": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "FetchBody": {"target_version": 1},
    "SkyrlLoraBody": {"lora_name": "x"},
    "RegisterBody": {"url": "http://x"},
    "VersionBody": {"new_version": "1"},
    **{name: {"model_path": "/x"} for name in ("ArealUpdateBody", "DiskBody")},
    **{name: {"workers": ["x"]} for name in ("DrainBody", "LendBody", "ReturnBody")},
}
"""A valid request by the name of the decoded type. The bodies of other types may be empty."""
VALUES: list[Any] = [
    *("", "x", "\u0000", [], {}, True, 1.5, -1, 2**31, 2**63, 2**70, 1e308, None, [[]], [None], [-1], [2**70], [1.5]),
    *({"x": 1}, [{}], [""], {"": {"": [[[]]]}}, "x" * 10_000, [[[[[[]]]]]]),
]
FEW_VALUES: list[Any] = ["x", True, 2**70, [1.5], {"": {"": [[[]]]}}]
SENT = 20
"""Of the bodies that the decoder of all routes refuses, a route receives one in twenty, other ones for each field. The
rest goes to the decoder alone."""
NO_JSON = (
    *(b"{", b"{]", b'{"a":}', b'"', b"nul", b"\x00", b"\xff\xfe", b"{} {}", b"{'a': 1}", b'{"a": 1,}'),
    *(
        '{"model": "é"}'.encode("latin-1"),
        '{"model": "x"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"model": "\\ud800"}',
    ),
    *(b'{"model": ' * 100_000, b"[" * 100_000, b'{"model": NaN}', b'{"model": Infinity}', b'{"model": -Infinity}'),
)
ROUTES = {**DATA, **ADMIN}
NO_OBJECT = (b"[]", b"1", b'"x"', b"true", b"null", b"[{}]")


def kind_of(route: tuple[str, str]) -> type[msgspec.Struct]:
    """Return the type that a route decodes."""
    kind = ROUTES[route].body
    assert isinstance(kind, type)
    assert issubclass(kind, msgspec.Struct)
    return kind


def base_of(kind: type) -> dict[str, Any]:
    """Return a valid request of the type."""
    return BASES.get(kind.__name__, {})


def paths(
    kind: type[msgspec.Struct], base: dict[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], msgspec.structs.FieldInfo]]:
    """Yield each field of a body and of its nested structs."""
    for field in msgspec.structs.fields(kind):
        path = (*prefix, field.encode_name)
        yield path, field
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from paths(inner, base, path)


def with_value(base: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of the body with another value at that path."""
    name, *rest = path
    if rest:
        inner = base.get(name)
        value = with_value(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**base, name: value}


def is_refused(body: dict[str, Any], kind: type) -> bool:
    """Return True if the types and bounds alone refuse the body."""
    try:
        msgspec.json.decode(msgspec.json.encode(body), type=kind)
    except (msgspec.ValidationError, OverflowError):
        return True
    return False


def is_strict(kind: Any) -> bool:
    """Return True if a field of this type is read strictly, as `test_lax.py` compares with vLLM."""
    return STRICT in getattr(kind, "__metadata__", ()) or any(map(is_strict, get_args(kind)))


def encode(body: Any) -> bytes:
    """Return JSON with numbers of any size."""
    return json.dumps(body).encode()


async def sent(http: Http, route: tuple[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status, and the error if there is one."""
    answer = await http.client.request(*route, content=body, headers={"Content-Type": "application/json"})
    if answer.status_code < 400:
        return answer.status_code, {}
    error = answer.json()["error"]
    # Anthropic's tool runner reads why it cannot have threads.
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert len(error["message"]) < 20_000
    return answer.status_code, error


def decoded(kind: type[msgspec.Struct], body: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the error with which each route of this type refuses the body."""
    try:
        decode_body(body, kind)
    except HttpError as error:
        return error.status, {"code": error.code, "param": error.param}
    return 200, {}


async def test_wrong_input_gives_400_with_the_field(serve: Serve, tmp_path: Path) -> None:
    """Input of a wrong type, out of bounds, missing, unknown, repeated or not JSON gives 400 with the field."""
    settings = Settings(max_body_bytes=4 << 20, tokenizer=save(make_byte_level(), tmp_path))
    config = SyntheticConfig(max_model_len=128)
    known: set[tuple[str, str]] = set()
    async with serve(settings, config=config) as http:
        problems: list[object] = []
        for turn, route in enumerate(sorted(key for key, each in ROUTES.items() if each.body is not None)):
            problems += [(route, each) for each in await wrong_bodies(http, route, turn)]
            problems += [(route, each) for each in await wrong_values(http, route, known)]
        assert problems == []

        assert (await http.client.get("/health")).status_code == 200
        await until_idle(http.engine, http.rb)
        assert (await http.rb.fleet.state()).workers[0].in_flight == 0
        request = rollbus.GenerateRequest(prompt_token_ids=[1], sampling=rollbus.SamplingParams(max_tokens=1))
        assert len((await http.rb.complete(request)).token_ids) == 1


async def wrong_bodies(http: Http, route: tuple[str, str], turn: int) -> list[tuple[object, ...]]:
    """Read bodies that are wrong as a whole. Return those that do not get 400 with the field, if there is one."""
    kind = kind_of(route)
    base = base_of(kind)
    wrong: list[tuple[bytes, str | None]] = [(body, None) for body in (*NO_JSON, *NO_OBJECT)]
    wrong.append((encode({**base, "no_such_field": 1}), "no_such_field"))
    for field in msgspec.structs.fields(kind):
        name, value = field.encode_name, base.get(field.encode_name, 1)
        if field.required:
            wrong.append((encode({k: v for k, v in base.items() if k != name}), name))
        rest = "".join(f", {json.dumps(k)}: {json.dumps(v)}" for k, v in base.items() if k != name)
        wrong.append((f'{{"{name}": {json.dumps(value)}, "{name}": {json.dumps(value)}{rest}}}'.encode(), name))
    problems: list[tuple[object, ...]] = []
    for number, (body, wanted_name) in enumerate(wrong, turn):
        status, error = decoded(kind, body) if number % SENT else await sent(http, route, body)
        is_named = wanted_name is None or error.get("param") == wanted_name
        if (status, error.get("code"), is_named) != (400, "invalid_request", True):
            problems.append((body[:80], status, error))
    return problems


async def wrong_values(http: Http, route: tuple[str, str], known: set[tuple[str, str]]) -> list[tuple[object, ...]]:
    """Read values in each field. Return those that are not refused with the field, although the type does.

    A field whose name and type an earlier route has read too gets a few values only: the same decoder reads it.
    """
    kind = kind_of(route)
    base = base_of(kind)
    problems: list[tuple[object, ...]] = []
    for turn, (path, field) in enumerate(paths(kind, base)):
        field_of = (path[-1], str(field.type))
        values = FEW_VALUES if field_of in known else VALUES
        known.add(field_of)
        for number, value in enumerate(values, turn):
            body_of = with_value(base, path, value)
            # Of these values, the lax reading accepts only `true` where the type refuses it: as the number 1.
            is_one = value is True and not is_strict(field.type)
            read_as = with_value(base, path, 1 if is_one else value)
            if is_refused(body_of, kind) and is_refused(read_as, kind):
                body = encode(body_of)
                status, error = decoded(kind, body) if number % SENT else await sent(http, route, body)
                is_right = (status, error.get("code")) == (400, "invalid_request")
                if not is_right or not (error.get("param") or "").startswith(path[0]):
                    problems.append((path, repr(value)[:40], status, error))
            elif route not in ADMIN:
                # The type alone does not decide whether this value is valid, but an error must name a field.
                status, error = await sent(http, route, encode(body_of))
                is_named = not error or error["param"] or error["code"] == "unknown_session"
                if status >= 500 or not is_named:
                    problems.append((path, repr(value)[:40], status, error))
    return problems
