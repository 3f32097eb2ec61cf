"""Work beside an engine runs on separate threads, and is prepared there too."""

import threading
from collections.abc import Iterator

from rollbus.workers.sources.threads import Job, run_quietly


async def test_jobs_are_created_outside_of_the_event_loop() -> None:
    """Jobs are created outside of the event loop, so that requests do not wait for them.

    There may be a job for each of thousands of tensors, and some jobs read a file.
    """
    made_on: list[int] = []
    done: list[int] = []

    def jobs() -> Iterator[Job]:
        for _ in range(3):
            made_on.append(threading.get_ident())
            yield lambda _scratch: done.append(threading.get_ident())

    await run_quietly(jobs())

    assert len(made_on) == len(done) == 3
    assert threading.get_ident() not in {*made_on, *done}
