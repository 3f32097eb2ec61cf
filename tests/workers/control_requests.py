"""What tests of commands ask of workers, and how they look at what came."""

from bus.queue.streams import queue_depths
from schemas.chunk import Chunk
from schemas.presence import WorkerState
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams
from tests.support.hand_client import MODEL, HandClient
from workers.engines.synthetic import SyntheticConfig

PROMPT_LEN = 2
SLOW = SyntheticConfig(step_s=0.002, max_model_len=10_000_000)
"""Slow enough that a command comes in the middle of a stream."""


def request_for(num_tokens: int, request_id: str, **fields: object) -> GenerateRequest:
    """A request for so many tokens."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(
        prompt_token_ids=[1] * PROMPT_LEN,
        sampling=sampling,
        request_id=request_id,
        **fields,  # type: ignore[arg-type]
    )


def endless(request_id: str) -> GenerateRequest:
    """A request that runs until somebody stops it."""
    return request_for(4_000_000, request_id)


def stream_of(chunks: list[Chunk]) -> tuple[bytes, bytes, int]:
    """A stream's tokens, its routing, and how many rows that is; its chunks are numbered without a gap."""
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    routing = [chunk.routed_experts for chunk in chunks if chunk.routed_experts is not None]
    return (
        b"".join(chunk.token_ids_data for chunk in chunks),
        b"".join(part.data for part in routing),
        sum(part.shape[0] for part in routing),
    )


async def until_left(client: HandClient, count: int) -> None:
    """Wait until so many requests are left in the queue; each look is a round trip."""
    while True:
        depths = await queue_depths(client.nats, client.subjects, (MODEL,))
        if sum(depth.waiting + depth.in_hand for depth in depths) == count:
            return


async def until_state(client: HandClient, worker: str, state: WorkerState) -> None:
    """Wait until a worker announces this state."""
    await client.until(lambda: worker in client.presences and client.presences[worker].state is state)
