"""Requests that wait for a worker of their group: each waits once, and no longer than others find room."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollbus.bus.protocol.placement.group_line import NO_ROOM_S, GroupLine
from rollbus.schemas.request import Lane


def line_of(*keys: str) -> GroupLine[str]:
    """A line whose requests came at 0, in groups that their first letters name."""
    line: GroupLine[str] = GroupLine()
    for key in keys:
        line.add("normal", ord(key[0]), key, 0)
    return line


def test_groups_stand_in_order_of_arrival_with_all_of_theirs() -> None:
    """A request of a group that waits already stands with the others of it."""
    line = line_of("a1", "b1", "a2", "c1")
    assert [keys for _, keys in line.first(2)] == [["a1", "a2"], ["b1"]]
    line.remove("b1")
    assert [keys for _, keys in line.first(9)] == [["a1", "a2"], ["c1"]]
    assert ("b1" in line, "c1" in line, len(line)) == (False, True, 3)


def test_earlier_lanes_come_first() -> None:
    """As in the queue: what resumes, then high, normal and low, whenever they came."""
    line: GroupLine[str] = GroupLine()
    lanes: tuple[Lane, ...] = ("low", "normal", "high", "resume", "normal")
    for number, lane in enumerate(lanes):
        line.add(lane, number, f"{number}", 0)
    assert [keys for _, keys in line.first(9)] == [["3"], ["2"], ["1"], ["4"], ["0"]]


def test_a_wait_without_room_is_bounded() -> None:
    """Nobody finds room: who waits leaves after the limit, those of a group side by side."""
    line = line_of("a1", "b1", "a2")
    line.add("normal", ord("c"), "late", 1)
    assert line.pop_late(NO_ROOM_S - 0.1) == []
    assert line.pop_late(NO_ROOM_S) == ["a1", "a2", "b1"]
    assert line.pop_late(NO_ROOM_S + 1) == ["late"]
    assert len(line) == 0


def test_who_sees_others_find_room_waits_on() -> None:
    """The limit counts from when somebody in the line last found room."""
    line = line_of("a1")
    line.note_room(1.5)
    assert line.pop_late(NO_ROOM_S + 1) == []
    assert line.pop_late(NO_ROOM_S + 1.5) == ["a1"]


class Lines(RuleBasedStateMachine):
    """Requests of three groups that come, go, find room and wait too long in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.line: GroupLine[int] = GroupLine()
        self.now, self.had_room_at, self.num_added = 0.0, -NO_ROOM_S, 0
        self.waiting: dict[int, tuple[int, float]] = {}

    @rule(group=st.integers(0, 2))
    def add(self, group: int) -> None:
        """A request comes."""
        key, self.num_added = self.num_added, self.num_added + 1
        self.line.add("normal", group, key, self.now)
        self.waiting[key] = group, self.now

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), has_room=st.booleans())
    def remove(self, data: st.DataObject, has_room: bool) -> None:
        """A request finds room, or its caller leaves."""
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[key]
        self.line.remove(key)
        if has_room:
            self.had_room_at = self.now
            self.line.note_room(self.now)

    @rule(seconds=st.sampled_from([0.1, 0.5, NO_ROOM_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        since = self.now - NO_ROOM_S
        late = {key for key, (_, came) in self.waiting.items() if came <= since and self.had_room_at <= since}
        popped = self.line.pop_late(self.now)
        assert set(popped) == late
        groups = [self.waiting.pop(key)[0] for key in popped]
        assert len([i for i, group in enumerate(groups) if group not in groups[:i]]) == len(
            [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
        )

    @invariant()
    def holds_what_waits(self) -> None:
        """Nobody is forgotten, and nobody is kept."""
        found = {key: group for group, keys in self.line.first(9) for key in keys}
        assert found == {key: group for key, (group, _) in self.waiting.items()}
        assert len(self.line) == len(self.waiting)


TestLines = Lines.TestCase
