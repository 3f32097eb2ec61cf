"""The model of a run without `--model`, and the command that forgets a model."""

import json
from pathlib import Path

import rollbus
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.server import Server
from tests.cli.support import run_rollbus
from tests.support.fleet import synthetic_worker


async def test_the_model_that_began_an_output_completes_it(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A second run without `--model` uses the model of the first. Each line and the summary name the model."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    options = ("--input", str(prompts), "--output", str(output), "--routed-experts", "none", "--json")
    prompts.write_text("".join(f'{{"prompt_token_ids": [{index + 1}]}}\n' for index in range(3)))
    async with (
        synthetic_worker(nats_url, fleet, worker_id="wa", model="a"),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        ended = await run_rollbus(nats_url, fleet, "generate", *options)
        assert (ended.code, json.loads(ended.stdout)["models"]) == (0, ["a"])
        # An interrupted run leaves fewer lines.
        output.write_text("".join(output.read_text().splitlines(keepends=True)[:1]))
        async with synthetic_worker(nats_url, fleet, worker_id="wb", model="b"):
            await rb.fleet.wait_for_workers(model="b")
            resumed = await run_rollbus(nats_url, fleet, "generate", *options)
            other = ("--input", str(prompts), "--output", str(tmp_path / "other.jsonl"))
            refused = await run_rollbus(nats_url, fleet, "generate", *other)

    assert (resumed.code, json.loads(resumed.stdout)["models"]) == (0, ["a"])
    assert [json.loads(line)["model"] for line in output.read_text().splitlines()] == ["a", "a", "a"]
    assert refused.code == 2
    assert refused.stderr.endswith("in.jsonl line 1 names no model; allowed: a, b\n")


async def test_a_model_is_forgotten(nats_url: str, fleet: str) -> None:
    """`forget-model` forgets a model without workers, and says so if there is nothing to forget."""
    await provision(Server(nats_url), fleet, ["a"])
    async with synthetic_worker(nats_url, fleet, model="b"), rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        forgotten = await run_rollbus(nats_url, fleet, "forget-model", "a")
        again = await run_rollbus(nats_url, fleet, "forget-model", "a", "--json")
        refused = await run_rollbus(nats_url, fleet, "forget-model", "b")
        assert await rb.fleet.known_models() == ("b",)

    assert (forgotten.code, forgotten.stdout) == (0, "forgot the model a\n")
    assert (again.code, json.loads(again.stdout)) == (0, {"model": "a", "was_known": False})
    assert refused.code != 0
    assert "MODEL 'b' has workers: " in refused.stderr
