"""Plays a trace through Dynamo's router and its mocker, in the Python that has Dynamo; for `bench.placement`.

    PYTHON bench/placement_dynamo.py TRACE WORKERS IN_FLIGHT round_robin|kv_router BLOCK_TOKENS ENGINE

TRACE is a file in Mooncake's format. ENGINE is JSON. The program prints one line of JSON for each request. It imports
no module of rollbus, because that Python does not have rollbus.
"""

import importlib
import json
import sys


def main() -> None:
    """Play the trace and print the result."""
    trace, workers, in_flight, mode, block_tokens, engine = sys.argv[1:]
    # Import by name, because type checkers and linters run in environments without Dynamo.
    api = importlib.import_module("dynamo.replay.api")
    report = api.run_trace_replay(
        [trace],
        extra_engine_args=json.dumps({"engine": json.loads(engine)}),
        num_workers=int(workers),
        replay_concurrency=int(in_flight),
        router_mode=mode,
        trace_block_size=int(block_tokens),
        capture_per_request=True,
    )
    for request in report.per_request:
        sys.stdout.write(f"{json.dumps(request)}\n")


if __name__ == "__main__":
    main()
