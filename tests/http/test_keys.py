"""`Idempotency-Key`: a command that is sent again with its key is executed once, under every route."""

from typing import Any

from tests.http.support import Control


async def test_a_repeat_of_each_command_gives_the_result_of_the_first(control: Control) -> None:
    """Each route gives the same response twice for one key, also if the state would reject the command now.

    Nothing is recorded twice: neither the version that a repeat would choose, nor the adapter that is gone.
    """
    async with control(2) as c:
        adapter, weights = str(c.root / "adapter"), str(c.root / "two")
        steps: list[tuple[str, str, Any]] = [
            ("POST", "/v1/rl/update_weights", {"path": weights}),
            ("POST", "/v1/rl/flush_cache", {"preempt": True}),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "math", "lora_path": adapter}),
            ("POST", "/v1/rl/unload_lora_adapter", {"name": "math"}),
            ("POST", "/v1/loras", {"lora_name": "code", "source": {"uri": f"file://{adapter}"}}),
            ("DELETE", "/v1/loras/code", None),
            ("POST", "/update_weights", {"weight_dir": adapter}),
            ("POST", "/v1/rl/drain", {"workers": ["w0"]}),
            ("POST", "/resume", None),
            ("POST", "/v1/rl/lend", {"workers": ["w0"]}),
            ("POST", "/v1/rl/return", {"workers": ["w0"]}),
            ("POST", "/start_weight_update", {}),
            ("POST", "/v1/rl/cancel_weight_update", {}),
        ]
        answers = []
        for number, (method, path, body) in enumerate(steps):
            headers = {"Idempotency-Key": f"step-{number}"}
            answers.append([await c.http.client.request(method, path, json=body, headers=headers) for _ in range(2)])
        [desired] = (await c.http.rb.fleet.state()).desired.values()
        first_key = {"Idempotency-Key": "step-0"}
        reused = await c.http.client.delete("/v1/loras/code", headers=first_key)

    for (first, again), (_, path, _) in zip(answers, steps, strict=True):
        assert (first.status_code, again.status_code) == (200, 200), (path, again.text)
        if first.headers["content-type"] == "application/json":
            names = ("status", "id", "epochs", "complete", "weight_version", "transfer")
            shown = [[answer.json().get(name) for name in names] for answer in (first, again)]
            assert shown[0] == shown[1], path
    # All but the two commands of the transfer.
    assert desired.epoch == len(steps) - 2
    assert len({seen.id for seen in desired.seen}) == len(desired.seen)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "key_reused")
