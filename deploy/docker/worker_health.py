"""Docker's health check of a worker: exits with 0 while it is alive, with the weights that it should have.

A paused worker is healthy; one that loads, or has lost its lease, is not.
"""

import http.client
import json
import sys

UNHEALTHY = {"connecting", "starting", "fenced", "outdated", "poisoned", "waiting_for_weights"}


def main() -> int:
    """Ask the worker itself, by its probe."""
    try:
        # Not urllib, which would ask a proxy.
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
