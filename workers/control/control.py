"""Hears commands and answers them: `accepted` at once, perhaps `progress`, then exactly one final word.

A command that sets a register is answered with what became of that register; one that nobody has recorded is recorded
here first, by whichever worker is quickest. The others are events, and are carried out once, by who hears them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from nats.aio.msg import Msg

from bus.connection import subscribe
from bus.control.store import DesiredStore
from bus.subjects import Subjects
from schemas.control import Abort, AckStatus, CheckWeights, State
from schemas.errors import (
    BusBroken,
    BusClosed,
    ControlCode,
    ControlError,
    EngineDead,
    InvalidRequest,
    PermissionDenied,
    RemoteProtocolError,
)
from schemas.limits import MAX_SEEN_COMMANDS
from schemas.messages import command_id_of, decode_command
from workers.control.answers import Answers
from workers.control.command_log import CommandLog, Heard
from workers.control.desire import Outcome, failure
from workers.control.events import Events
from workers.control.parts import Parts
from workers.control.reading import DesiredReader
from workers.control.reconcile import Reconciler
from workers.control.registers import Registers

__all__ = ["Control"]

logger = logging.getLogger(__name__)

RECORD_RETRY_S: Final = 1.0
"""Between attempts to record a command, where the bus has no JetStream for a while."""
LATE_S: Final = 1.0
"""Beyond its `timeout_s`, after which a recorded command is answered whatever its register waits for."""


class Control:
    """The commands of one worker.

    Args:
        parts: the worker.
        registers: what commands set.
    """

    def __init__(self, parts: Parts, registers: Registers) -> None:
        config = parts.config
        self._parts = parts
        self._subjects = Subjects(config.fleet)
        self._store = DesiredStore(parts.nats, self._subjects)
        self._registers = registers
        self._log = CommandLog()
        self._answers = Answers(parts, self._log)
        self.reconciler = Reconciler(parts, registers)
        self.reader = DesiredReader(
            self._store, model=config.model, worker=config.worker_id, on_read=self.reconciler.on_read
        )
        self.reconciler.connect(self.reader, self.look)
        self._events = Events(parts, registers, self.reconciler)
        # Of each kind one at a time: what takes long must not hold up what is quick. No more wait than are under way.
        self._lanes: dict[str, asyncio.Queue[Heard]] = {
            name: asyncio.Queue(MAX_SEEN_COMMANDS) for name in ("record", "quick", "check", "event")
        }
        self.bad_messages = 0
        """Commands that nobody could be answered for."""

    def __repr__(self) -> str:
        """One line with the parts."""
        return f"<Control {self._log!r} {self.reader!r} {self.reconciler!r}>"

    async def listen(self) -> None:
        """Hear commands, and of changes of the desired state; once.

        Raises:
            BusClosed: the connection is closed.
        """
        await subscribe(self._parts.nats, self._subjects.controls, self._on_command)
        await subscribe(self._parts.nats, self._store.subject(self._parts.config.model), self._on_hint)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs side by side until the worker stops."""
        return {
            "read": self.reader.run(),
            "reconcile": self._guard(self.reconciler.run),
            "record": self._guard(partial(self._serve, "record", self._record)),
            **{
                f"commands.{name}": self._guard(partial(self._serve, name, self._carry_out))
                for name in ("quick", "check", "event")
            },
        }

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Tell the worker when its engine has died, rather than end it with all that is open."""
        try:
            await work()
        except EngineDead as exc:
            self._parts.on_dead(exc)

    def start(self) -> None:
        """The engine runs: prove it, and bring it to what is desired."""
        self.reconciler.start()

    @property
    def problem(self) -> str | None:
        """Why this worker serves nothing, does not know what is desired, or lacks something; None: no problem."""
        return self.reconciler.problem or self.reader.problem or self._registers.problem or self.reconciler.lacking

    # What is heard

    async def _on_hint(self, _message: Msg) -> None:
        self.reader.look()

    async def _on_command(self, message: Msg) -> None:
        # One that cannot speak is not asked: it reads what was recorded when it can.
        if not self._parts.life.may_speak():
            return
        try:
            controller = self._answers.check_controller(message.subject.rpartition(".")[2])
            self._hear(controller, message.data)
        except (InvalidRequest, RemoteProtocolError) as exc:
            self.bad_messages += 1
            logger.warning("command.bad subject=%s error=%s", message.subject, exc)

    def _hear(self, controller: str, data: bytes) -> None:
        try:
            command = decode_command(data)
        except InvalidRequest as exc:
            command_id = command_id_of(data)
            if command_id is None:
                raise
            self._answers.refuse(controller, command_id, ControlError(ControlCode.INVALID_COMMAND, exc.message))
            return
        config = self._parts.config
        if command.model not in (None, config.model):
            return
        if command.workers is not None and config.worker_id not in command.workers:
            return
        heard = self._log.find(command.id)
        if heard is not None:
            heard.controller = controller
            self._answers.repeat(heard)
            return
        heard = self._log.begin(command, controller, time.monotonic())
        if heard is None:
            problem = f"{MAX_SEEN_COMMANDS} commands are under way here"
            self._answers.refuse(controller, command.id, ControlError(ControlCode.NOT_SERVING, problem))
            return
        logger.info("command.heard command=%s id=%s epoch=%s", command.command, command.id, command.epoch)
        self._answers.say(heard, AckStatus.ACCEPTED)
        self._begin(heard)

    def _begin(self, heard: Heard) -> None:
        command = heard.command
        if command.register is not None and command.epoch is not None:
            heard.needs_read = self.reader.look_for(command.register, command.epoch, command.id)
            if self.reader.num_read >= heard.needs_read:
                # Heard of by its recording, and perhaps carried out already: maybe nothing else will have it looked at.
                self.look()
        elif command.register is not None:
            self._lanes["record"].put_nowait(heard)
        elif isinstance(command, Abort | State):
            self._lanes["quick"].put_nowait(heard)
        else:
            self._lanes["check" if isinstance(command, CheckWeights) else "event"].put_nowait(heard)

    # What follows

    async def _serve(self, lane: str, work: Callable[[Heard], Awaitable[None]]) -> None:
        while True:
            heard = await self._lanes[lane].get()
            # What was dropped meanwhile, by a fence, is nobody's business any more.
            if self._log.is_under_way(heard):
                await work(heard)

    async def _record(self, heard: Heard) -> None:
        """Record a command of a program that leaves this to the workers."""
        while self._log.is_under_way(heard):
            try:
                _, heard.epoch = await self._store.record(self._parts.config.model, heard.command)
            except PermissionDenied as exc:
                problem = f"{exc}: record it before it is published"
                self._answers.end(heard, failure(ControlError(ControlCode.INVALID_COMMAND, problem)))
            except (BusBroken, BusClosed) as exc:
                logger.warning("command.unrecorded id=%s error=%s", heard.command.id, exc)
                await asyncio.sleep(RECORD_RETRY_S)
            except RemoteProtocolError as exc:
                self._answers.end(heard, failure(ControlError(ControlCode.STORAGE, str(exc))))
            except ControlError as exc:
                self._answers.end(heard, failure(exc))
            else:
                heard.needs_read = self.reader.look()
                return

    async def _carry_out(self, heard: Heard) -> None:
        """Do what an event says; whatever it trips over, the worker goes on."""
        timeout_s = heard.command.timeout_s
        answer: dict[str, Any] = {}
        outcome = Outcome()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._events.do(heard.command)
        except ControlError as exc:
            outcome = failure(exc)
        except TimeoutError:
            outcome = failure(ControlError(ControlCode.TIMEOUT, f"not done within {timeout_s:g} s"))
        except EngineDead:
            raise
        except Exception as exc:
            # The boundary of one command, as that of registers.
            logger.exception("command.failed command=%s id=%s", heard.command.command, heard.command.id)
            outcome = failure(ControlError(ControlCode.ENGINE_ERROR, f"{type(exc).__name__}: {exc}"))
        self._answers.end(heard, outcome, **answer)

    def look(self) -> None:
        """Say how far recorded commands are, or how they and the late ones ended. Call it every second too."""
        now = time.monotonic()
        for heard in self._log.under_way:
            register, timeout_s = heard.command.register, heard.command.timeout_s
            if register is None:
                continue
            outcome = None
            if heard.epoch is not None:
                stage = self.reconciler.stage_of(register, heard.epoch)
                if stage is not None:
                    self._answers.report(heard, stage)
                if self.reader.num_read >= heard.needs_read:
                    outcome = self.reconciler.outcome_of(register, heard.epoch)
            if outcome is None and now > heard.heard_at + timeout_s + LATE_S:
                what = "recorded" if heard.epoch is None else "brought about"
                problem = f"not {what} within {timeout_s:g} s; the worker is {self._parts.life.state}"
                outcome = failure(ControlError(ControlCode.TIMEOUT, problem))
            if outcome is not None:
                self._answers.end(heard, outcome)

    def look_again(self) -> None:
        """The worker's state has changed: what was to wait for that need not wait any more."""
        if not self.reader.is_fresh:
            self.reader.look()
        self.reconciler.look()

    def fence(self) -> None:
        """This worker has given up what it had: another life of it answers nothing of what it was asked before."""
        self._log.drop()
        self._registers.transfer.lose()
        self.reader.forget()
