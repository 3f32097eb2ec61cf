"""Health check of a worker for Docker: exit with 0 if the worker is alive and has its target weights.

A paused worker is healthy. A worker that loads, or has lost its lease, is not.
"""

import http.client
import json
import sys

UNHEALTHY = {"connecting", "starting", "fenced", "outdated", "poisoned", "waiting_for_weights"}


def main() -> int:
    """Ask the probe of the worker, and return the exit code."""
    try:
        # Not urllib, which would use a proxy.
        connection = http.client.HTTPConnection("127.0.0.1", 8081, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        state = json.load(answer)["state"]
    except OSError as exc:
        sys.stdout.write(f"no answer: {exc}\n")
        return 1
    sys.stdout.write(f"{state}\n")
    return int(answer.status != http.HTTPStatus.OK or state in UNHEALTHY)


if __name__ == "__main__":
    sys.exit(main())
