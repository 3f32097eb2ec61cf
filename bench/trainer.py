"""Measures time and memory from the wire to the tensors of a training step, for rollbus and for HTTP servers.

    python -m bench.trainer [--tokens 32768] [--prompt-tokens 4096 31744] [--rounds 9]
                            [--samples 1000] [--sample-tokens 128 256 512 1024] [--json FILE]

The HTTP ways use base64 in JSON. The bench measures a sequence of 48 layers and top-8 with each number of prompt
tokens. The other tokens are sampled. All ways must give the same tensors. Their rounds take turns. Messages are in
memory, so the network is not measured.

Then the bench stitches and packs conversations of 4 turns each, with several lengths. The milliseconds should be
proportional to the bytes. The last row describes the line through the other rows: the time per megabyte, the time at 0
MB, and the largest distance of a measurement from the line, as a share of its own time.

The ways, from the bytes of one finished request to the tensors of a training step. `rollbus`: the worker's frames,
received as a client does, then `Stitcher` and `pack`. The other ways read the answer of an HTTP server, a base64 string
in JSON. They make their tensors as prime-rl does: from Python lists, with expert ids as int32. prime-rl also sends the
data to an orchestrator and from there to the trainer. These steps are not measured. pybase64 is installed with vLLM.

Memory is measured in a process for each way: the maximum growth of the process in bytes, from Linux's `VmHWM`. This
includes the memory of numpy and torch, and the finished tensors. It reads messages from the file one by one when the
way asks for them, as from a socket. So a frame counts while it is in use, and an HTTP body counts as a whole.
"""

import argparse
import asyncio
import base64
import gc
import io
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
import torch

import rollbus
from bench.report import Report, give_back, peak_bytes, program, reset_peak, resident_bytes
from bench.ways import vllm_answer
from rollbus.bus.client.calls import Call, Inbox
from rollbus.bus.client.coordinator import AttemptCoordinator, ChildRequest
from rollbus.bus.protocol.attempt.events import PublishingPossible
from rollbus.bus.protocol.stream.chunk_writer import SEGMENT_BYTES, ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.link_receiver import FrameVerdict, LinkReceiver
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.frontend.cli.tables import Spread, Value, in_turns
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.errors import RequestError
from rollbus.schemas.messages import LinkMessage, RequestKey, decode_frame
from rollbus.schemas.options import arg
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.schemas.sampling import SamplingParams
from rollbus.trainer import MicroBatch, Stitcher, pack

NUM_LAYERS, TOP_K, NUM_EXPERTS = 48, 8, 128
"""The shape of Qwen3-30B-A3B."""
VOCABULARY = 151_936
WEIGHT_VERSION = 7
ADVANTAGE = 0.5
MAX_FRAME_BYTES = 1024**2
"""Default `max_payload` of NATS."""
CREDIT = 2**60

Tensors = dict[str, torch.Tensor]
"""Tensors of an HTTP way: each is [1, S], and `routed_experts` is i32[1, S - 1, L, K]."""


@dataclass(frozen=True)
class Rollout:
    """One finished request."""

    prompt: npt.NDArray[np.int32]
    """i4[Lp]."""
    sampled: npt.NDArray[np.int32]
    """i4[G]."""
    logprobs: npt.NDArray[np.float32]
    """f4[G]."""
    rows: Rows
    """u1[Lp + G - 1, L, K]."""


def make_prompt(num_tokens: int) -> npt.NDArray[np.int32]:
    """Return i4[num_tokens], the same each time."""
    return np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, np.int32)


def make_rollout(num_tokens: int, num_prompt: int) -> Rollout:
    """Return a sequence of `num_tokens` tokens with `num_prompt` prompt tokens, the same each time."""
    rng, num_sampled = np.random.default_rng(1), num_tokens - num_prompt
    return Rollout(
        make_prompt(num_prompt),
        rng.integers(0, VOCABULARY, num_sampled, np.int32),
        -rng.exponential(size=num_sampled).astype(np.float32),
        rng.integers(0, NUM_EXPERTS, (num_tokens - 1, NUM_LAYERS, TOP_K), np.uint8),
    )


# rollbus


class _Nowhere:
    """Replaces the queue and the workers: each request can be published immediately, and aborts are not sent."""

    def add(self, child: ChildRequest) -> None:
        child.handle(PublishingPossible(max_bytes=1 << 20, is_served=True), time.monotonic())

    def record_admission(self, child: ChildRequest, waited_s: float) -> None:
        pass

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> None:
        pass

    def is_blocked(self, child: ChildRequest) -> bool:
        return False

    def others(self, child: ChildRequest) -> tuple[()]:
        return ()

    def waiting_reason(self, child: ChildRequest) -> str:
        return ""

    def abort(self, worker: str, key: RequestKey) -> None:
        pass


def _steps(rollout: Rollout) -> Iterator[RequestStep]:
    """Yield the steps as an engine makes them: the prompt's rows with the first token, then a row with each token."""
    num_prompt, last = len(rollout.prompt), len(rollout.sampled) - 1
    for i in range(last + 1):
        first = num_prompt + i - 1 if i else 0
        yield RequestStep(
            key="",
            token_ids=rollout.sampled[i : i + 1],
            logprobs=rollout.logprobs[i : i + 1],
            routed_experts=rollout.rows[first : num_prompt + i],
            routed_experts_start=first,
            finish_reason=FinishReason.LENGTH if i == last else None,
        )


def _write_frames(rollout: Rollout, *, merge: bool) -> list[bytes]:
    sender = LinkSender(incarnation="life", link=0, client_incarnation="me", max_frame_bytes=MAX_FRAME_BYTES)
    key = RequestKey("rollout")
    routing = RoutedExpertsInfo(num_layers=NUM_LAYERS, top_k=TOP_K, num_experts=NUM_EXPERTS, dtype="u1")
    writer = ChunkWriter(key, prompt_len=len(rollout.prompt), routing=routing, start=0, segment_bytes=SEGMENT_BYTES)
    sender.open(key, writer)
    frames: list[bytes] = []

    def send() -> None:
        data: bytes | None = b""
        while data is not None:
            sender.receive(
                LinkMessage(
                    WIRE_VERSION, [], client_incarnation="me", incarnation="life", acked=len(frames), credit=CREDIT
                )
            )
            data = sender.seal()
            if data is not None:
                frames.append(data)

    for step in _steps(rollout):
        sender.encode_step(key, step, WEIGHT_VERSION)
        if not merge:
            send()
    send()
    return frames


async def _receive(request: GenerateRequest, frames: Iterable[bytes]) -> rollbus.Generation:
    """Process the frames of one request as a client does, from its NATS subscription to its caller."""
    exchange, receiver = AttemptCoordinator(), LinkReceiver("me")
    exchange.connect(_Nowhere(), _Nowhere().abort)  # type: ignore[arg-type]
    call = Call(request, Inbox(lambda callback: None), streams=False)
    exchange.submit(call)
    for data in frames:
        frame = decode_frame(data)
        if receiver.receive(frame, len(data), time.monotonic()) is FrameVerdict.ACCEPTED:
            exchange.handle_frame("worker", frame)
    if call.error is not None:
        raise call.error
    return call.generation()


def _read_frames(prompt: npt.NDArray[np.int32], messages: Iterable[bytes]) -> MicroBatch:
    request = GenerateRequest(
        prompt_token_ids=prompt,
        request_id="rollout",
        sampling=SamplingParams(max_tokens=None),
        return_routed_experts=True,
    )
    stitcher = Stitcher()
    stitcher.add(prompt, asyncio.run(_receive(request, messages)))
    sample = stitcher.sample(advantage=ADVANTAGE)
    del stitcher
    return pack([sample], max_tokens=len(sample) - 1)[0]


# HTTP


def _answer(rollout: Rollout, routed_experts: object) -> bytes:
    """Return the answer of vLLM's token server in JSON."""
    answer = vllm_answer(rollout.sampled.tolist(), rollout.logprobs.tolist(), routed_experts)
    return json.dumps(answer, separators=(",", ":")).encode()


def _write_npy(rollout: Rollout) -> list[bytes]:
    """Write the answer as vLLM does: the string contains a numpy file."""
    file = io.BytesIO()
    np.save(file, rollout.rows)
    return [_answer(rollout, base64.b64encode(file.getvalue()).decode())]


def _write_raw(rollout: Rollout) -> list[bytes]:
    """Write the answer as the modified servers of prime-rl and Dynamo do."""
    rows = rollout.rows
    data = base64.b64encode(rows.tobytes()).decode()
    return [_answer(rollout, {"data": data, "shape": list(rows.shape), "start": 0, "dtype": rows.dtype.name})]


def _to_tensors(prompt: list[int], sampled: list[int], logprobs: list[float], rows: torch.Tensor) -> Tensors:
    num_prompt, num_sampled = len(prompt), len(sampled)
    return {
        "input_ids": torch.tensor(prompt + sampled, dtype=torch.long).unsqueeze(0),
        "position_ids": torch.tensor(list(range(num_prompt + num_sampled)), dtype=torch.long).unsqueeze(0),
        "loss_mask": torch.tensor([False] * num_prompt + [True] * num_sampled, dtype=torch.bool).unsqueeze(0),
        "advantages": torch.tensor([ADVANTAGE] * (num_prompt + num_sampled), dtype=torch.float).unsqueeze(0),
        "logprobs": torch.tensor([0.0] * num_prompt + logprobs, dtype=torch.float).unsqueeze(0),
        "routed_experts": rows.to(torch.int32).unsqueeze(0),
    }


def _read_json(prompt: npt.NDArray[np.int32], messages: Iterable[bytes]) -> Tensors:
    """Read the answer with the standard library only."""
    choice = json.loads(next(iter(messages)))["choices"][0]
    rows = np.load(io.BytesIO(base64.b64decode(choice.pop("routed_experts"))))
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return _to_tensors(prompt.tolist(), choice["token_ids"], logprobs, torch.from_numpy(rows))


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs
    token_ids: list[int]
    routed_experts: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Answer)


def _read_msgspec(prompt: npt.NDArray[np.int32], messages: Iterable[bytes]) -> Tensors:
    """Read the answer with a typed decoder that skips unused fields, and base64 with SIMD."""
    choice = _decoder.decode(next(iter(messages))).choices[0]
    rows = np.load(io.BytesIO(pybase64.b64decode(choice.routed_experts)))
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    return _to_tensors(prompt.tolist(), choice.token_ids, logprobs, torch.from_numpy(rows))


_DATA_PREFIX = b'"routed_experts":{"data":"'


def _read_cut_out(prompt: npt.NDArray[np.int32], messages: Iterable[bytes]) -> Tensors:
    """Read the answer as prime-rl's client does: cut the string out of the body, and decode the rest with `json`."""
    body = next(iter(messages))
    first = body.index(_DATA_PREFIX) + len(_DATA_PREFIX)
    last = body.index(b'"', first)
    choice: dict[str, Any] = json.loads(body[:first] + body[last:])["choices"][0]
    data = pybase64.b64decode_as_bytearray(memoryview(body)[first:last])
    routed = choice["routed_experts"]
    rows = torch.frombuffer(data, dtype=getattr(torch, routed["dtype"])).reshape(routed["shape"])
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return _to_tensors(prompt.tolist(), choice["token_ids"], logprobs, rows)


# All ways


@dataclass(frozen=True)
class Way:
    """A way from a request's bytes to tensors."""

    what: str
    """Name in the table."""
    write: Callable[[Rollout], list[bytes]]
    """Returns the messages that the other side sends."""
    read: Callable[[npt.NDArray[np.int32], Iterable[bytes]], MicroBatch | Tensors]
    """The measured function. Its arguments are the prompt, which the client knows, and the messages."""


WAYS = {
    "rollbus-streamed": Way("rollbus, a frame per token", lambda r: _write_frames(r, merge=False), _read_frames),
    "rollbus-merged": Way("rollbus, merged frames", lambda r: _write_frames(r, merge=True), _read_frames),
    "json": Way("HTTP, json + base64", _write_npy, _read_json),
    "msgspec": Way("HTTP, msgspec + pybase64", _write_npy, _read_msgspec),
    "cut-out": Way("HTTP, string cut out", _write_raw, _read_cut_out),
}
"""The ways, by name."""


def differences(batch: MicroBatch, tensors: Tensors) -> list[str]:
    """Return the names of the tensors that differ.

    Positions in the tensors of an HTTP way are tokens. Positions in a batch are predictions.
    """
    experts = torch.empty(0) if batch.routed_experts is None else batch.routed_experts.to(torch.int32)
    pairs = {
        "input_ids": (batch.input_ids, tensors["input_ids"][:, :-1]),
        "target_ids": (batch.target_ids, tensors["input_ids"][:, 1:]),
        "position_ids": (batch.position_ids, tensors["position_ids"][:, :-1]),
        "loss_mask": (batch.loss_mask, tensors["loss_mask"][:, 1:]),
        "advantages": (batch.advantages, tensors["advantages"][:, 1:]),
        "logprobs": (batch.sampler_logprobs, tensors["logprobs"][:, 1:]),
        "routed_experts": (experts, tensors["routed_experts"]),
    }
    return [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]


def tensor_bytes(result: MicroBatch | Tensors) -> int:
    """Return the bytes of the tensors of a result."""
    values = result.values() if isinstance(result, dict) else (getattr(result, name) for name in result.__slots__)
    return sum(value.nbytes for value in values if value is not None)


_SIZE = struct.Struct("<Q")
WARM_UP_TOKENS = 64


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    """Store messages for `read_messages`."""
    with path.open("wb") as file:
        for message in messages:
            file.write(_SIZE.pack(len(message)))
            file.write(message)


def read_messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file one at a time, without storing them."""
    with path.open("rb", buffering=0) as file:
        while size := file.read(_SIZE.size):
            yield file.read(_SIZE.unpack(size)[0])


def grown_bytes(name: str, path: Path, num_prompt: int) -> int:
    """Return the maximum growth of this process while it reads a file's messages."""
    way, prompt = WAYS[name], make_prompt(num_prompt)
    small = make_rollout(WARM_UP_TOKENS, WARM_UP_TOKENS // 2)
    # Do not count memory that the first request allocates once.
    way.read(small.prompt, way.write(small))
    give_back()
    reset_peak()
    before = resident_bytes()
    way.read(prompt, read_messages(path))
    return peak_bytes() - before


def print_growth(way: str, path: str, prompt_tokens: str) -> None:
    """Print the growth of this process."""
    sys.stdout.write(f"{grown_bytes(way, Path(path), int(prompt_tokens))}\n")


ROOT = Path(__file__).resolve().parent.parent
MEGABYTE = 10**6
NUM_TURNS = 4
MAX_TOKENS = 32_768
"""Maximum predictions in a micro-batch."""
T = TypeVar("T")
Turns = list[tuple[npt.NDArray[np.int32], rollbus.Generation]]
"""The turns of a conversation: each prompt and the generation that follows it."""


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of `run` and its result. Garbage of earlier code is collected first."""
    gc.collect()
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def measure_ways(num_tokens: int, num_prompt: int, rounds: int) -> list[dict[str, Value]]:
    """Return the row of each way: milliseconds over `rounds`, peak memory, and bytes on the wire.

    Raises:
        ValueError: two ways give different tensors.
    """
    rollout = make_rollout(num_tokens, num_prompt)
    messages = {name: way.write(rollout) for name, way in WAYS.items()}
    sizes = check_same(rollout, messages)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, way in in_turns(rounds, WAYS.items()):
        taken, result = timed(partial(way.read, rollout.prompt, messages[name]))
        seconds[name].append(taken)
        # Free the tensors before the next round, so that each round finds the same free memory.
        del result
    return [
        {
            "way": way.what,
            "prompt_tokens": num_prompt,
            "sampled_tokens": num_tokens - num_prompt,
            "messages": len(messages[name]),
            "wire_mb": sum(map(len, messages[name])) / MEGABYTE,
            "ms": Spread.of([1000 * taken for taken in seconds[name]]),
            "tensors_mb": sizes[name] / MEGABYTE,
            "peak_mb": peak_of(name, messages[name], num_prompt) / MEGABYTE,
        }
        for name, way in WAYS.items()
    ]


def check_same(rollout: Rollout, messages: dict[str, list[bytes]]) -> dict[str, int]:
    """Check that all ways give the same tensors. Return the bytes of the tensors by way.

    Raises:
        ValueError: two ways give different tensors.
    """
    results = {name: way.read(rollout.prompt, messages[name]) for name, way in WAYS.items()}
    batches = {name: result for name, result in results.items() if isinstance(result, MicroBatch)}
    for name, batch in batches.items():
        for other, tensors in results.items():
            if not isinstance(tensors, MicroBatch) and (wrong := differences(batch, tensors)):
                raise ValueError(f"{name} and {other} differ in {', '.join(wrong)}")
    return {name: tensor_bytes(result) for name, result in results.items()}


def peak_of(name: str, messages: list[bytes], num_prompt: int) -> int:
    """Return the peak memory of a way in bytes, measured in a separate process."""
    with tempfile.TemporaryDirectory(prefix="rollbus-bench-") as folder:
        path = Path(folder) / "messages"
        write_messages(path, messages)
        command = [sys.executable, "-m", "bench.processes", "trainer:print_growth", name, str(path), str(num_prompt)]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def make_conversation(index: int, num_tokens: int) -> Turns:
    """Return the turns of a conversation. Half of each turn is prompt.

    Each turn has the rows that follow those of the previous turn.
    """
    rng = np.random.default_rng(index)
    token_ids = rng.integers(0, 1000, num_tokens, np.int32)
    rows = rng.integers(0, 128, (num_tokens - 1, NUM_LAYERS, TOP_K), np.uint8)
    turns, start = [], 0
    for turn in range(NUM_TURNS):
        first, end = (num_tokens * part // (2 * NUM_TURNS) for part in (2 * turn + 1, 2 * turn + 2))
        request = rollbus.GenerateRequest(prompt_token_ids=token_ids[:first])
        generation = rollbus.Generation(
            request=request,
            request_id=request.request_id,
            child=0,
            prompt_len=first,
            token_ids=token_ids[first:end],
            logprobs=np.full(end - first, -0.5, np.float32),
            weight_versions=np.full(end - first, turn, np.int32),
            routed_experts=rows[start : end - 1].copy(),
            start=start,
            finish_reason=FinishReason.STOP,
        )
        turns.append((token_ids[:first], generation))
        start = end - 1
    return turns


def stitch_and_pack(conversations: list[Turns]) -> list[MicroBatch]:
    """Stitch and pack the conversations of a step, as a trainer does."""
    samples = []
    for turns in conversations:
        stitcher = Stitcher()
        for prompt, generation in turns:
            stitcher.add(prompt, generation)
        samples.append(stitcher.sample(advantage=1.0))
    return pack(samples, max_tokens=MAX_TOKENS)


def measure_conversations(count: int, num_tokens: int, rounds: int) -> dict[str, Value]:
    """Return the row of `count` conversations of `num_tokens` each."""
    conversations = [make_conversation(index, num_tokens) for index in range(count)]
    milliseconds = []
    for _ in range(rounds):
        seconds, batches = timed(lambda: stitch_and_pack(conversations))
        milliseconds.append(1000 * seconds)
        num_batches = len(batches)
        del batches
    megabytes = count * (num_tokens - 1) * NUM_LAYERS * TOP_K / MEGABYTE
    return {
        "way": "stitch and pack",
        "samples": count,
        "sample_tokens": num_tokens,
        "rows_mb": megabytes,
        "batches": num_batches,
        "ms": Spread.of(milliseconds),
        "mb_per_s": Spread.of([1000 * megabytes / taken for taken in milliseconds]),
    }


def check_linear(megabytes: Sequence[float], milliseconds: Sequence[float]) -> dict[str, Value]:
    """Return the row of the line through these measurements. It minimizes the squares of the relative distances."""
    sizes, taken = np.array(megabytes), np.array(milliseconds)
    per_megabyte, at_nothing = np.polyfit(sizes, taken, 1, w=1 / taken)
    off = np.abs(per_megabyte * sizes + at_nothing - taken) / taken
    return {
        "way": "linear",
        "ms_per_mb": float(per_megabyte),
        "ms_at_0_mb": float(at_nothing),
        "off_percent": 100 * float(off.max()),
    }


def _run(args: argparse.Namespace, report: Report) -> None:
    for num_prompt in args.prompt_tokens:
        for row in measure_ways(args.tokens, num_prompt, args.rounds):
            report.add(**row)
    megabytes, milliseconds = [], []
    for num_tokens in args.sample_tokens:
        row = measure_conversations(args.samples, num_tokens, args.rounds)
        report.add(**row)
        if isinstance(row["rows_mb"], float) and isinstance(row["ms"], Spread):
            megabytes.append(row["rows_mb"])
            milliseconds.append(row["ms"].median)
    if len(megabytes) > 2:
        report.add(**check_linear(megabytes, milliseconds))


if __name__ == "__main__":
    program(
        "trainer",
        "Measure time and memory from the wire to tensors.",
        _run,
        arg("--tokens", None, "", type=int, default=32768),
        arg("--prompt-tokens", None, "", type=int, nargs="*", default=[4096, 31744]),
        arg("--samples", None, "", type=int, default=1000),
        arg("--sample-tokens", None, "", type=int, nargs="*", default=[128, 256, 512, 1024]),
        rounds=9,
    )
