"""The fleet over HTTP: the `openai` package, then token ids, log probabilities, weight versions and routed experts.

A trainer that speaks HTTP sends and receives token ids, so no text is tokenized twice. The header `X-Session-ID` sends
the turns of a conversation to the worker that has the earlier turns in its prefix cache.

Run it with any Python that has `openai` and `numpy`. It does not need rollbus. It takes some seconds:

    rollbus up               # in another terminal: NATS, a worker, and the HTTP service
    python http_openai.py    # --http URL, if `rollbus up` prints another address than http://127.0.0.1:8080
"""

import argparse
import base64
import os
import uuid

import numpy as np
import openai


def decoded(routed_experts: dict) -> np.ndarray:
    """Return the rows of routed experts, [positions, layers, top-k]."""
    data = base64.b64decode(routed_experts["data"])
    return np.frombuffer(data, routed_experts["dtype"]).reshape(routed_experts["shape"])


def main(http: str, num_steps: int) -> None:
    """Chat as with any server of OpenAI's API, then run a conversation in token ids."""
    client = openai.OpenAI(base_url=f"{http}/v1", api_key=os.environ.get("ROLLBUS_HTTP_TOKEN", "none"))
    model = client.models.list().data[0].id
    question = {"role": "user", "content": "How many apples are left?"}

    stream = client.chat.completions.create(model=model, messages=[question], max_tokens=16, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    print(f"chat, streamed: {text!r}")

    def tokenize(**body: object) -> list[int]:
        """Return the token ids of `messages` or of a `prompt`."""
        return client.post("/tokenize", body={"model": model, **body}, cast_to=object)["tokens"]

    tokens, num_rows, session = tokenize(messages=[question]), 0, uuid.uuid4().hex
    for step in range(num_steps):
        answer = client.completions.create(
            model=model,
            prompt=tokens,
            max_tokens=16,
            logprobs=0,
            extra_headers={"X-Session-ID": session},
            # Request only the rows that earlier turns did not return.
            extra_body={"nvext": {"extra_fields": ["engine_data"], "routed_experts_prompt_start": num_rows}},
        )
        engine = answer.nvext["engine_data"]
        ids, versions = engine["completion_token_ids"], sorted(set(engine["completion_weight_versions"]))
        print(f"turn {step + 1}: {len(tokens)} prompt tokens, {len(ids)} tokens sampled by weights {versions}")
        print(f"  ids {ids[:4]}..., logprobs {[round(each, 2) for each in engine['completion_logprobs'][:4]]}...")
        if "routed_experts" in engine:
            rows = decoded(engine["routed_experts"])
            print(f"  routed experts of positions {num_rows} to {num_rows + len(rows) - 1}: {rows.shape}")
            num_rows += len(rows)
        # The text between two turns in the chat format of the tiny model (ChatML).
        end = "" if answer.choices[0].finish_reason == "stop" else "<|im_end|>"
        between = f"{end}\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
        tokens += ids + tokenize(prompt=between, add_special_tokens=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8080", help="address of the service (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="turns of the conversation (default: 2)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    main(arguments.http, arguments.steps)
