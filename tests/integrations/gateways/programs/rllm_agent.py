"""Program for the trainers' Python: an agent through rllm-model-gateway 0.1.0, unchanged; prints its traces.

python rllm_agent.py URL CHECKPOINT SETTINGS

The gateway runs as its command does, with `--worker URL/v1`. Its release on PyPI has no cumulative mode; its source has
one (rllm-org/rllm, commit 9beb6e0f, with the same version number). The program sends the calls of that mode through the
gateway: the first turn as a chat, and each later one to /v1/completions with prompt ids, `add_special_tokens` false and
the gateway's own `logprobs` and `return_token_ids`.
"""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from openai import AsyncOpenAI
from transformers import AutoTokenizer

TURNS = 4
NEXT = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def start(url):
    """Start the gateway and return its process and its client after it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "rllm_model_gateway", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--worker", f"{url}/v1", "--store", "memory"]
    process = subprocess.Popen(command)  # noqa: ASYNC220 - nothing else runs yet
    async with httpx.AsyncClient() as http:
        while process.poll() is None:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return process, f"http://127.0.0.1:{port}"
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    raise RuntimeError(f"the gateway ended with {process.returncode}")


async def streamed(events):
    """Return the text of a stream, which an agent adds to its messages."""
    text = ""
    async for event in events:
        if event.choices:
            part = event.choices[0]
            text += (part.delta.content if hasattr(part, "delta") else part.text) or ""
    return text


async def play(gateway, session, settings, tokenizer, gate, *, stream):
    """Talk for some turns. The third turn waits until the file `gate` exists."""
    async with AsyncOpenAI(base_url=f"{gateway}/sessions/{session}/v1", api_key="none", timeout=600) as client:
        messages = [{"role": "user", "content": f"What is {session}?"}]
        options = {"model": settings["model"], "max_tokens": 24, "temperature": 1.0, "stream": stream}
        trace = None
        for turn in range(TURNS):
            if turn == 1:
                print("second", flush=True)
            while turn == 2 and not gate.exists():  # noqa: ASYNC110 - the test is another process
                await asyncio.sleep(0.05)
            if trace is not None:
                ids = [*trace, *tokenizer.encode(NEXT.format(messages[-1]["content"]), add_special_tokens=False)]
                answer = await client.completions.create(
                    **options, prompt=ids, extra_body={"add_special_tokens": False}
                )
                text = await streamed(answer) if stream else answer.choices[0].text
            else:
                answer = await client.chat.completions.create(**options, messages=messages)
                text = await streamed(answer) if stream else answer.choices[0].message.content
                ids = None
            found = await last_trace(gateway, session, turn)
            trace = [*(ids or found["prompt_token_ids"]), *found["completion_token_ids"]]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Turn {turn}?"}]


async def last_trace(gateway, session, turn):
    """Return the trace of a turn. The gateway stores it after its answer."""
    async with httpx.AsyncClient() as http:
        while True:
            traces = (await http.get(f"{gateway}/sessions/{session}/traces")).json()
            if len(traces) > turn:
                return traces[turn]
            await asyncio.sleep(0.05)


async def main(url, checkpoint, settings):
    """Run all sessions at once, half of them streamed, and print their traces."""
    process, gateway = await start(url)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    try:
        sessions = {f"s{number}": number % 2 == 1 for number in range(settings["sessions"])}
        gate = Path(settings["gate"])
        async with asyncio.TaskGroup() as tasks:
            for name, stream in sessions.items():
                tasks.create_task(play(gateway, name, settings, tokenizer, gate, stream=stream))
        seen = {}
        async with httpx.AsyncClient() as http:
            for name in sessions:
                await last_trace(gateway, name, TURNS - 1)
                seen[name] = (await http.get(f"{gateway}/sessions/{name}/traces")).json()
    finally:
        process.terminate()
        process.wait()
    print("seen", json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], json.loads(sys.argv[3])))
