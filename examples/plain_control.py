"""Pause and resume a fleet without rollbus, with nats-py alone: `python plain_control.py URL FLEET`."""

import asyncio
import json
import sys
import uuid

import nats

FINAL = ("applied", "failed", "unsupported", "stale")


async def main(url: str, fleet: str) -> None:
    """Find the live workers. Pause them: each finishes its requests and accepts no others. Then resume them."""
    root, me = f"rb.v1.{fleet}", f"plain-{uuid.uuid4().hex[:8]}"
    connection = await nats.connect(url)
    acks = await connection.subscribe(f"{root}.ack.{me}.*")
    presences = await connection.subscribe(f"{root}.presence.*")
    await connection.publish(f"{root}.ping")
    await asyncio.sleep(0.5)  # the longest time in which a live worker answers
    workers = set()
    while presences.pending_msgs:
        presence = json.loads((await presences.next_msg()).data)
        if presence["state"] not in ("starting", "fenced", "failed", "stopped"):
            workers.add(presence["worker"])
    for options in ({"command": "pause", "mode": "wait"}, {"command": "resume"}):
        command = {**options, "id": uuid.uuid4().hex, "timeout_s": 30}
        await connection.publish(f"{root}.control.{me}", json.dumps(command).encode())
        owing = set(workers)
        while owing:
            ack = json.loads((await acks.next_msg(timeout=60)).data)
            print(ack["worker"], ack["command"], ack["status"], ack.get("error", ""))
            if ack["id"] == command["id"] and ack["status"] in FINAL:
                owing.discard(ack["worker"])
    await connection.close()


asyncio.run(main(*sys.argv[1:]))
