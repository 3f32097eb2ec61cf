"""Generate tokens without rollbus, with nats-py and msgspec alone: `python plain_nats.py URL FLEET MODEL`."""

import array
import asyncio
import re
import sys
import uuid

import msgspec
import nats


async def main(url: str, fleet: str, model: str) -> None:
    """Publish one request to the model's queue, and print its chunks until the terminal chunk."""
    client = f"plain-{uuid.uuid4().hex[:8]}"
    reply_to = f"rb.v1.{fleet}.plain.{client}.answers"
    model = re.sub(r"[^\w-]", lambda m: "".join(f"={byte:02X}" for byte in m[0].encode()), model, flags=re.ASCII)
    sampling = {"max_tokens": 8, "logprobs": 0}
    request = {"request_id": "example", "prompt_token_ids": [1, 2, 3], "sampling": sampling, "timeout_s": 60}
    connection = await nats.connect(url)
    frames = await connection.subscribe(reply_to)
    message = msgspec.msgpack.encode({"client": client, "reply_to": reply_to, "request": request})
    # `publish` returns when the queue has stored the message.
    await connection.jetstream().publish(f"rb.v1.{fleet}.req.{client}.{model}.normal", message)
    current, expected, end = 0, 0, None
    while end is None:
        for chunk in msgspec.msgpack.decode((await frames.next_msg(timeout=60)).data)[4]:
            _, attempt, _, index, _, ids, logprobs, rows, _, _, end = chunk[:11]
            if attempt > current:
                print(f"a worker was lost, and attempt {attempt} starts over")
                current, expected = attempt, 0
            if index != expected:
                sys.exit(f"received chunk {index} of attempt {attempt}, expected chunk {expected} of attempt {current}")
            expected += 1
            print(array.array("i", ids).tolist(), array.array("f", logprobs).tolist(), rows and rows[1], sep="\t")
    print(f"finish_reason={end[0]} tokens={end[1]} rows={end[2]} error={end[4]}")
    await connection.close()


asyncio.run(main(*sys.argv[1:]))
