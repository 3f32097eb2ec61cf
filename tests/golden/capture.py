"""Record a run of a real engine as a golden vector: `python -m tests.golden.capture --help`.

It uses the protocol's plain mode with only a NATS client, so that it records exactly the bytes on the wire.
"""

import argparse
import asyncio

import msgspec
import nats

from rollbus.bus.subjects import Subjects
from rollbus.schemas.messages import RequestMessage, decode_frame, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.golden.generate import ROOT, Captured, generate
from tests.support.waits import SOON_S

CLIENT = "golden"


async def capture(url: str, *, fleet: str, model: str, about: str, prompt: list[int]) -> Captured:
    """Send one request and return it with the frames that answer it.

    Raises:
        TimeoutError: no terminal chunk arrived in time.
    """
    subjects = Subjects(fleet)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    request = GenerateRequest(
        prompt_token_ids=prompt,
        sampling=params,
        request_id="captured",
        model=model,
        return_routed_experts=True,
        routed_experts_prompt_start=2,
    )
    reply_to = f"{subjects.plain(CLIENT)}captured"
    message = encode(RequestMessage(client=CLIENT, reply_to=reply_to, request=msgspec.Raw(encode(request))))
    frames: list[bytes] = []
    connection = await nats.connect(url)
    try:
        async with asyncio.timeout(SOON_S):
            subscription = await connection.subscribe(reply_to)
            await connection.flush()
            await connection.publish(subjects.request(CLIENT, model, "normal"), message)
            async for incoming in subscription.messages:
                frames.append(incoming.data)
                if any(chunk.is_terminal for chunk in decode_frame(incoming.data).chunks):
                    break
    finally:
        await connection.close()
    return Captured(about=about, request=message, frames=frames)


def main() -> None:
    """Parse the command line, record the run, and write the file and its view."""
    parser = argparse.ArgumentParser(description="Record a run of a real engine as a golden vector.")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--fleet", default="default")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--about", required=True, help="model and engine, for people: 'tiny Qwen3-MoE, vLLM 0.30.0'")
    parser.add_argument("--prompt", default="1,2,3,4,5,6,7,8", help="token ids (default: %(default)s)")
    parser.add_argument("name", help="of the file in tests/golden/v1/captured")
    args = parser.parse_args()
    prompt = [int(token_id) for token_id in args.prompt.split(",")]
    run = asyncio.run(capture(args.nats, fleet=args.fleet, model=args.model, about=args.about, prompt=prompt))
    (ROOT / "captured" / f"{args.name}.msgpack").write_bytes(msgspec.msgpack.encode(run))
    generate(ROOT)


if __name__ == "__main__":
    main()
