"""Loans over HTTP and the command line, which find each other's."""

from typing import Any

import pytest

from rollbus.frontend.cli.exits import ExitCode
from tests.cli.support import run_rollbus
from tests.http.live_support import watching
from tests.http.support import Control

LEND, RETURN = "/v1/rl/lend", "/v1/rl/return"


@pytest.mark.slow
async def test_a_loan_by_http_is_shown_and_returned_by_the_command(control: Control, nats_url: str, fleet: str) -> None:
    """`status`, `top` and the page show a loan and its rest; `rollbus return` ends it, and a second return fails."""
    async with control(2) as c:
        lent = await c.http.client.post(LEND, json={"workers": ["w0"], "for_s": 590.0})
        assert (lent.status_code, lent.json()["status"]) == (200, "lent")
        for command in ("status", "top"):
            shown = await run_rollbus(nats_url, fleet, command, *(["--once"] if command == "top" else []))
            assert "lent, 9" in shown.stdout, shown
        async with watching(c.http) as viewer:
            rows = {row["worker"]: row["loan_left_s"] for row in viewer.workers(await viewer.next("fleet"))}
            assert rows == {"w0": 600, "w1": None}
        ended = await run_rollbus(nats_url, fleet, "return", "w0")
        assert ended.code == ExitCode.OK, ended
        assert {each.state for each in (await c.http.rb.fleet.state()).workers} == {"serving"}
        again = await run_rollbus(nats_url, fleet, "return", "w0")
        assert again.code == ExitCode.FAILED
        assert "not lent" in again.stderr


@pytest.mark.slow
async def test_a_loan_by_the_command_is_returned_by_http(control: Control, nats_url: str, fleet: str) -> None:
    """The last worker is lent only with `--allow-none`; wrong values are rejected by name and lend nothing."""
    async with control() as c:
        refused = await run_rollbus(nats_url, fleet, "lend", "w0")
        assert refused.code == ExitCode.FAILED, refused
        assert "allow" in refused.stderr
        wrong: list[tuple[dict[str, Any], int, str]] = [
            ({"workers": ["w0"]}, 409, "not_serving"),
            ({"workers": ["nobody"], "allow_none": True}, 400, "workers"),
            ({"workers": ["w0"], "for_s": -1, "allow_none": True}, 400, "for_s"),
            ({"workers": ["w0"], "for_s": 1e9, "allow_none": True}, 400, "for_s"),
            ({"workers": ["w0", "w1"]}, 400, "workers"),
            ({}, 400, "workers"),
        ]
        for body, status, name in wrong:
            answer = await c.http.client.post(LEND, json=body)
            assert answer.status_code == status, (body, answer.status_code, answer.text)
            assert name in answer.text
        [worker] = (await c.http.rb.fleet.state()).workers
        assert worker.state == "serving"
        lent = await run_rollbus(nats_url, fleet, "lend", "w0", "--for", "20m", "--allow-none")
        assert lent.code == ExitCode.OK, lent
        back = await c.http.client.post(RETURN, json={"workers": ["w0"]})
        assert (back.status_code, back.json()["status"]) == (200, "returned")
        again = await c.http.client.post(RETURN, json={"workers": ["w0"]})
        assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
