"""Evaluate the model on a file of tasks: pass@k, with results in a file, so that a killed run can continue.

Each task is a line of JSON with `id`, `prompt` and `expected`. An answer passes if it contains `expected`. If the file
does not exist, the program makes twenty tasks, which random text sometimes passes. Replace `passes` by your own check.
Each result has its task and weight version. After new weights, the program evaluates all tasks again.

Run it on the workers' machine, with the Python that has rollbus. It takes some seconds:

    rollbus up            # in another terminal: NATS and a worker
    python evaluate.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
    python evaluate.py    # finds all results in results.jsonl; after Ctrl-C or kill -9 it evaluates the other tasks
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

import rollbus

SAMPLING = rollbus.SamplingParams(max_tokens=12, temperature=1.0, n=8)
KS = (1, 2, 4, 8)


def passes(task: dict, answer: str) -> bool:
    """Return True if the answer is right."""
    return task["expected"] in answer


def read_tasks(path: Path) -> list[dict]:
    """Read the tasks. Make twenty if the file does not exist."""
    if not path.exists():
        letters = "abcdefghijklmnopqrst"
        made = [{"id": each, "prompt": f"Write a word with the letter {each}.", "expected": each} for each in letters]
        path.write_text("".join(json.dumps(task) + "\n" for task in made))
        print(f"{path} did not exist: made {len(made)} tasks")
    with path.open() as file:
        return [json.loads(line) for line in file]


def read_results(path: Path) -> list[dict]:
    """Read the results of earlier runs. Remove the last line if a kill cut it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if whole != lines:
        path.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def pass_at(k: int, n: int, num_passed: int) -> float:
    """Return the probability that one of k answers passes, estimated from n answers (Chen et al., 2021)."""
    return 1 - math.comb(n - num_passed, k) / math.comb(n, k)


def main(arguments: argparse.Namespace) -> None:
    """Evaluate the tasks without a result, and print pass@k of all."""
    with rollbus.sync.connect(arguments.nats) as rb:
        rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
        version, tokenizer = worker.weight_version, AutoTokenizer.from_pretrained(worker.model_path)
        tasks = {str(task["id"]): task for task in read_tasks(arguments.tasks)[: arguments.steps]}
        if not tasks:
            raise SystemExit(f"{arguments.tasks} has no tasks")
        wanted = version, SAMPLING.n
        found = read_results(arguments.results)
        results = {each["id"]: each for each in found if (each["weight_version"], each["n"]) == wanted}
        to_do = [name for name in tasks if name not in results]
        print(f"{len(tasks)} tasks with weights {version}: {len(tasks) - len(to_do)} done before, {len(to_do)} to do")

        def requests() -> Iterator[rollbus.GenerateRequest]:
            for name in to_do:
                prompt = tokenizer.encode(tasks[name]["prompt"])
                yield rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=SAMPLING, request_id=name)

        with arguments.results.open("a") as file:
            # Results arrive in the order in which they finish. Each is written immediately.
            for generation in rb.complete_many(requests(), max_in_flight=16):
                if generation.error is not None:
                    raise generation.error
                name, answers = generation.request_id, (generation, *generation.siblings)
                if any(answer.finish_reason == rollbus.FinishReason.ABORT for answer in answers):
                    raise SystemExit("an operator aborted answers: start again to evaluate the other tasks")
                if any((answer.weight_versions != version).any() for answer in answers):
                    raise SystemExit("the fleet has loaded new weights: start again to evaluate them")
                num_passed = sum(passes(tasks[name], tokenizer.decode(answer.token_ids)) for answer in answers)
                result = {"id": name, "weight_version": version, "n": len(answers), "num_passed": num_passed}
                print(json.dumps(result), file=file, flush=True)
                results[name] = result
                print(f"task {name}: {num_passed} of {len(answers)} answers passed")
    for k in KS:
        scores = [pass_at(k, results[name]["n"], results[name]["num_passed"]) for name in tasks]
        print(f"pass@{k} of {len(scores)} tasks: {sum(scores) / len(scores):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, help="tasks to evaluate, from the first on (default: all)")
    parser.add_argument("--tasks", type=Path, default=Path("tasks.jsonl"), help="default: tasks.jsonl")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: results.jsonl")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    main(arguments)
