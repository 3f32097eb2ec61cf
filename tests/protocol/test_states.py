"""The transition tables: each state is reachable and can end, and no transition leaves a final state."""

import enum
import itertools

import pytest

from rollbus.bus.protocol.attempt.machine import REQUEST, RequestEvent, RequestState
from rollbus.bus.protocol.states import (
    WORKER,
    WORKER_REQUEST,
    StateMachine,
    WorkerEvent,
    WorkerRequestEvent,
    WorkerRequestState,
)
from rollbus.schemas.errors import LocalProtocolError
from rollbus.schemas.presence import WorkerState

AnyMachine = StateMachine[enum.StrEnum, enum.StrEnum]
TABLES = [
    pytest.param(REQUEST, set(RequestState), set(RequestEvent), id="request"),
    pytest.param(WORKER_REQUEST, set(WorkerRequestState), set(WorkerRequestEvent), id="held"),
    pytest.param(WORKER, set(WorkerState) - {WorkerState.UNKNOWN}, set(WorkerEvent), id="worker"),
]
each_table = pytest.mark.parametrize(("machine", "states", "events"), TABLES)


def reachable(machine: AnyMachine, first: enum.StrEnum) -> set[enum.StrEnum]:
    """Return the states that are reachable from `first`, including `first`."""
    found = {first}
    while more := {after for (state, _), after in machine.transitions.items() if state in found} - found:
        found |= more
    return found


@each_table
def test_every_state_is_reachable(machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]) -> None:
    """Each state is reachable from the initial state, and each event occurs in a transition."""
    assert reachable(machine, machine.initial) == states
    assert {event for _, event in machine.transitions} == events


@pytest.mark.proves("P1")
@each_table
def test_every_state_has_an_event_that_leads_to_a_final_state(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """Each state has an event that leads to a final state, so nothing waits forever."""
    for state in states - machine.final:
        assert any(machine.transitions.get((state, event)) in machine.final for event in events)


@pytest.mark.proves("P1")
@each_table
def test_a_final_state_has_no_transitions(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """A final state accepts no event."""
    assert machine.final
    assert not {state for state, _ in machine.transitions} & machine.final


@each_table
def test_a_state_and_event_without_a_transition_raise_an_error(
    machine: AnyMachine, states: set[enum.StrEnum], events: set[enum.StrEnum]
) -> None:
    """A pair of state and event has the transition of the table, or raises an error that names the pair."""
    for state, event in itertools.product(states, events):
        if (state, event) in machine.transitions:
            assert machine.next(state, event) is machine.transitions[state, event]
        else:
            with pytest.raises(
                LocalProtocolError, match=f"event {event} is invalid for a {machine.name} in state {state}"
            ):
                machine.next(state, event)
