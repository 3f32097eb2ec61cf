"""The tree of a session: which served turn a history continues, where it forks, and what a leaf's sample has."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.frontend.sessions import tree as module
from rollbus.frontend.sessions.messages import MessageKey, canonical_arguments, frame_of, key_of
from rollbus.frontend.sessions.samples import ids_bytes, join_rows, leaf_sample, rllm_traces
from rollbus.frontend.sessions.tree import Fork, SessionError, SessionTree, Turn

USER = {"role": "user", "content": "How much?"}
SETTING: dict[str, Any] = {"model": "m", "tools": None, "variables": {}}
ARGUMENTS = '{"b": [1, 2.50], "a": "x"}'


def called(arguments: str = ARGUMENTS, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    """Return an answer with a call."""
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "Well.", "tool_calls": [{"id": call_id, "function": function}], **more}


def tool(text: str) -> dict[str, Any]:
    """Return a tool's result."""
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def add(tree: SessionTree, name: str, parent: str | None, messages: list[Any], answer: Any, **more: Any) -> Turn:
    """Add a turn with three prompt tokens and two sampled ones."""
    size = 0 if parent is None else len(tree.token_ids(tree.turns[parent]))
    fields: dict[str, Any] = {
        "prompt_ids": ids_bytes([1, 2, 3]),
        "token_ids": ids_bytes([4, 5]),
        "logprobs": np.array([-0.5, -0.25], "<f4").tobytes(),
        "weight_versions": ids_bytes([7, 7]),
        "rows_start": max(size - 1, 0),
        "num_rows": 5 - (parent is None),
        "finish_reason": "stop",
        "frame": frame_of(SETTING),
        "setting": SETTING if parent is None else None,
        **more,
    }
    turn = Turn(id=name, parent=parent, messages=messages, answer=answer, **fields)
    tree.add(turn)
    return turn


def small_tree() -> SessionTree:
    """Return a tree with a call, its result and an answer."""
    tree = SessionTree()
    add(tree, "t0", None, [USER], called(reasoning="Hm."))
    add(tree, "t1", "t0", [tool("5")], {"role": "assistant", "content": "It is 5."})
    return tree


@pytest.mark.parametrize(
    ("given", "turn"),
    [
        ("msg_r1_0", "r1"),
        ("rs_r1_12", "r1"),
        ("fc_r1_1_0", "r1_1"),
        ("chatcmpl-r1", "r1"),
        ("r1", "r1"),
        ("msg_r12_0", None),
        ("msg_xr1_0", None),
        ("chatcmpl-r1-", None),
    ],
)
def test_an_id_is_that_of_an_answer_as_a_whole(given: str, turn: str | None) -> None:
    """The id of an item or answer has the whole id of its request, not only its characters."""
    tree, answer = SessionTree(), {"role": "assistant", "content": "Same."}
    for name in ("r1", "r1_1"):
        add(tree, f"t-{name}", None, [USER], answer, request_id=name)
    add(tree, "last", None, [USER], answer, request_id="r")
    found = tree.find([USER, {**answer, "id": given}, USER], SETTING).parent
    assert found.id == ("last" if turn is None else f"t-{turn}")


@pytest.mark.parametrize(
    "answer",
    [
        called(),
        called('{"a":"x","b":[1,2.50]}'),
        called(call_id="another"),
        called(content="  Well.\n"),
        called(content=[{"type": "text", "text": "Well."}]),
        called(reasoning_content=" Hm.\n", refusal=None, annotations=[]),
    ],
)
def test_an_answer_that_came_back_as_served_continues_its_turn(answer: dict[str, Any]) -> None:
    """Blanks, the order of arguments, another id and a dropped reasoning do not make another turn."""
    match = small_tree().find([USER, answer, tool("6")], SETTING)
    assert (match.parent.id, match.index) == ("t0", 2)
    assert match.fork == Fork(message=2, field="content")


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (called('{"a": "x", "b": [1, 2.5]}'), "tool_calls"),
        (called('{"a": "y", "b": [1, 2.50]}'), "tool_calls"),
        (called('{"a": "x"'), "tool_calls"),
        (called(content="Well"), "content"),
        (called(content="We\u0301ll."), "content"),
        (called(reasoning="Edited."), "reasoning"),
    ],
)
def test_an_edited_answer_forks(answer: dict[str, Any], field: str) -> None:
    """A changed text, argument or number is no continuation, even with the id of the served call."""
    match = small_tree().find([USER, answer, tool("5")], SETTING)
    assert (match.parent, match.index) == (None, 0)
    assert match.fork == Fork(message=1, field=field)


def test_a_message_is_read_once_for_all_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or long arguments would hold the event loop once more for each branch."""
    tree, read = SessionTree(), list[Any]()
    for name in "abc":
        add(tree, name, None, [USER], called(f'{{"a": "{name}"}}'))

    def read_key(message: Any) -> MessageKey:
        read.append(message)
        return key_of(message)

    monkeypatch.setattr(module, "key_of", read_key)
    assert tree.find([USER, called(), tool("5")], SETTING).fork == Fork(message=1, field="tool_calls")
    assert read == [called()]


def test_forks_record_the_first_message_that_differs() -> None:
    """Another system prompt, a compacted history, other tools, and the same request again each fork with a reason."""
    tree = small_tree()
    assert tree.find([USER, called(), tool("5")], SETTING).fork == Fork(message=3, field="sibling")
    assert tree.find([{"role": "system", "content": "New."}, USER], SETTING).fork == Fork(message=0, field="role")
    for name, changed in (("tools", [{}]), ("variables", {"a": 1}), ("model", "n")):
        match = tree.find([USER, called(), tool("5")], {**SETTING, name: changed})
        assert (match.parent, match.fork) == (None, Fork(message=0, field=name))
        assert (match.other is None) == (name == "model")
    assert tree.find([USER, called(), tool("5"), {"role": "user", "content": "So?"}], SETTING).fork == Fork(
        message=3, field="role"
    )
    continued = [USER, called(), tool("5"), {"role": "assistant", "content": "It is 5."}, USER]
    match = tree.find(continued, SETTING)
    assert (match.parent and match.parent.id, match.index, match.fork) == ("t1", 4, None)


def test_of_equal_turns_the_one_whose_id_comes_back_is_continued_else_the_last_complete_one() -> None:
    """Siblings with equal text are told apart by the id of a call, or the last one that was complete counts."""
    tree = SessionTree()
    for number in range(4):
        add(tree, f"t{number}", None, [USER], called(call_id=f"c{number}"), is_complete=number != 3)
    found = [tree.find([USER, called(call_id=each), tool("5")], SETTING).parent for each in ("c1", "gone", "c3")]
    assert [turn and turn.id for turn in found] == ["t1", "t2", "t3"]


def test_the_longest_branch_is_continued() -> None:
    """If two branches have equal turns, the one with more of the history is continued."""
    tree = small_tree()
    add(tree, "t2", None, [USER], called())
    match = tree.find([USER, called(), tool("5"), {"role": "assistant", "content": "It is 5."}, USER], SETTING)
    assert match.parent.id == "t1"


def test_interrupted_turns_are_no_leaves_by_default() -> None:
    """The turn before an interrupted one is a leaf, until the interrupted one is asked for."""
    tree = small_tree()
    add(tree, "t2", "t1", [USER], {"role": "assistant", "content": "No"}, is_complete=False)
    assert [turn.id for turn in tree.leaves()] == ["t1"]
    assert [turn.id for turn in tree.leaves(interrupted=True)] == ["t2"]


def test_a_sample_has_each_token_once_and_trains_only_sampled_ones() -> None:
    """The arrays of a sample have one entry for each token of the path."""
    tree = small_tree()
    sample = leaf_sample(tree, tree.turns["t1"], {"t0": 0.5}, 1.0, "checked")
    assert sample.token_ids == [1, 2, 3, 4, 5] * 2
    assert sample.loss_mask == [False, False, False, True, True] * 2
    assert sample.weight_versions == [-1, -1, -1, 7, 7] * 2
    assert sample.turn_of_token == [0] * 5 + [1] * 5
    assert sample.logprobs == [0, 0, 0, -0.5, -0.25] * 2
    assert (sample.reward, sample.turn_rewards) == (1.0, {"t0": 0.5})
    traces = list(rllm_traces(tree, [tree.turns["t1"]], "s"))
    assert [len(each["prompt_token_ids"]) for each in traces] == [3, 8]
    assert traces[1]["messages"] == [USER, called(reasoning="Hm."), tool("5")]


def test_rows_of_a_path_are_one_less_than_tokens_and_a_hole_is_an_error() -> None:
    """The row of the last token of a turn comes with the next turn. A missing row is an error that gives the turn."""
    tree = small_tree()
    path = tree.path(tree.turns["t1"])
    rows = {"t0": np.zeros((4, 2, 2), "u1"), "t1": np.ones((5, 2, 2), "u1")}
    assert join_rows(path, rows)[:, 0, 0].tolist() == [0] * 4 + [1] * 5
    for broken in ({"t0": rows["t0"]}, {**rows, "t0": rows["t0"][:3]}, {**rows, "t1": rows["t1"][1:]}):
        with pytest.raises(SessionError) as caught:
            join_rows(path, broken)
        assert caught.value.code == "rows_missing"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
def test_arguments_serialized_again_are_equal(value: Any) -> None:
    """Blanks, escapes and the order of names do not change the canonical form."""
    reordered = dict(reversed(value.items())) if isinstance(value, dict) else value
    assert canonical_arguments(json.dumps(value)) == canonical_arguments(
        json.dumps(reordered, ensure_ascii=False, indent=2)
    )


@pytest.mark.parametrize("hostile", ["[" * 100_000, "{", "", '{"a": NaN}', None, 5, {"a": 1}])
def test_hostile_arguments_have_a_form(hostile: Any) -> None:
    """Arguments that are not JSON, or nested without end, are compared as text."""
    assert isinstance(canonical_arguments(hostile), str)
