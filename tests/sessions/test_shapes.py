"""Samples in the shapes of rllm and verifiers, and as parquet in the record of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai

import rollbus
from rollbus.bus.client.record_writer import SPANS, RunRecorder
from rollbus.frontend.http import Settings
from rollbus.frontend.sessions.samples import leaf_sample, rllm_traces, verifiers_trace
from rollbus.integrations.sessions import open_session
from tests.control.support import write_checkpoint
from tests.http.support import http_service
from tests.sessions.support import CONFIG, TOOL, Owner, Serving, agent_of, save_qwen3, write_call
from tests.sessions.test_tree import USER, add, called, small_tree, tool

LIST, TEXT, NUMBER, OBJECT = list, str, (int, float), dict
RLLM: dict[str, Any] = {
    "trace_id": TEXT,
    "session_id": TEXT,
    "model": TEXT,
    "messages": LIST,
    "prompt_token_ids": LIST,
    "response_message": OBJECT,
    "completion_token_ids": LIST,
    "logprobs": LIST,
    "finish_reason": (str, type(None)),
    "token_counts": OBJECT,
    "timestamp": NUMBER,
}
"""Fields that a session knows of `TraceRecord` in rllm_model_gateway/models.py of rllm-model-gateway 0.1.0."""
NODE: dict[str, Any] = {
    "parent": (int, type(None)),
    "message": OBJECT,
    "sampled": bool,
    "timestamp": NUMBER,
    "token_ids": LIST,
    "mask": LIST,
    "logprobs": LIST,
}
"""Fields that a session knows of `MessageNode` in verifiers/v1/graph.py of verifiers 0.4.0. A root has `tools` too."""
MESSAGES = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}
"""Fields of the messages in verifiers/v1/types.py of verifiers 0.4.0."""


def forked_tree() -> Any:
    """Return a tree with two leaves."""
    tree = small_tree()
    setting = {"model": "m", "tools": [TOOL], "variables": {}}
    add(tree, "t2", None, [{"role": "developer", "content": "Be brief."}, USER], called(), setting=setting)
    return tree


def test_the_traces_have_the_shape_of_rllm() -> None:
    """Each turn is one trace, with all tokens of its prompt, though two leaves may share it."""
    tree = forked_tree()
    traces = list(rllm_traces(tree, tree.leaves(), "s"))
    assert [trace["trace_id"] for trace in traces] == ["t0", "t1", "t2"]
    for trace in traces:
        assert trace.keys() - {"weight_version"} == RLLM.keys()
        assert all(isinstance(trace[name], kind) for name, kind in RLLM.items())
        assert trace["token_counts"] == {"prompt": len(trace["prompt_token_ids"]), "completion": 2}
    assert [trace["finish_reason"] for trace in traces] == ["tool_calls", "stop", "tool_calls"]
    assert traces[1]["prompt_token_ids"] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert traces[2]["model"] == "m"


def test_the_trace_has_the_shape_of_verifiers() -> None:
    """The paths of the graph have the tokens, masks and log probabilities of the samples of the leaves."""
    tree = forked_tree()
    leaves = tree.leaves()
    trace = verifiers_trace(tree, leaves, "s", 0.5)
    nodes = trace["nodes"]
    assert trace["rewards"] == {"session": {"score": 0.5}}
    for at, node in enumerate(nodes):
        assert node.keys() - {"tools"} == NODE.keys()
        assert ("tools" in node) == (node["parent"] is None)
        assert all(isinstance(node[name], kind) for name, kind in NODE.items())
        assert node["message"].keys() == MESSAGES[node["message"]["role"]]
        assert node["parent"] is None or node["parent"] < at
    inner = {node["parent"] for node in nodes}
    ends = [at for at in range(len(nodes)) if at not in inner]
    assert [call["node"] for call in trace["calls"]] == [at for at, node in enumerate(nodes) if node["sampled"]]
    for end, leaf in zip(ends, leaves, strict=True):
        path, at = [], end
        while at is not None:
            path.append(nodes[at])
            at = nodes[at]["parent"]
        sample = leaf_sample(tree, leaf, {}, None, "whole")
        joined = {name: [each for node in path[::-1] for each in node[name]] for name in ("token_ids", "mask")}
        assert joined == {"token_ids": sample.token_ids, "mask": sample.loss_mask}
        sampled = [each for node in path[::-1] for each in node["logprobs"]]
        assert sampled == np.array(sample.logprobs)[sample.loss_mask].tolist()
    assert nodes[0]["message"]["content"] == USER["content"]
    assert nodes[2]["message"] == {"role": "tool", "content": tool("5")["content"], "tool_call_id": "c1"}


def test_spans_of_kv_say_which_weights_computed_it() -> None:
    """A turn whose weights changed has two spans, one whose KV was computed again has one, and one unknown has none."""
    tree = small_tree()
    versions = np.array([7, 8], "<i4").tobytes()
    for name, parent, kv_from in (("a", "t1", -1), ("b", "a", 1), ("c", "b", None)):
        more = {"kv_from": kv_from, "weight_versions": versions, "lora_versions": versions if name == "b" else b""}
        add(tree, name, parent, [USER], {"role": "assistant"}, **more)
    sample = leaf_sample(tree, tree.turns["c"], {}, None, "tail")
    assert sample.kv_lora_version_spans == [None, None, None, ((0, 8),), None]
    assert sample.kv_version_spans == [None, None, ((0, 7), (13, 8)), ((0, 8),), None]


async def test_a_session_whose_weights_changed_says_which_computed_its_kv(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Each turn has the version of its tokens and of its whole KV, though the prompt of the later turn is cached."""
    writes += ["One.", "Two."]
    weights = tmp_path / "weights"
    for seed, name in enumerate(("one", "two")):
        write_checkpoint(weights / name, seed=seed)
    worker: dict[str, Any] = {"model_path": str(weights / "one"), "weight_roots": (str(weights),)}
    settings = Settings(tokenizer=save_qwen3(tmp_path), reasoning_parser="qwen3")
    async with http_service(nats_url, fleet, settings, config=CONFIG, **worker) as http:
        owner = Owner(http.client)
        history: list[Any] = [USER]
        session = await owner.open()
        async with agent_of(session) as agent:
            for version in (0, 7):
                if version:
                    await http.rb.fleet.update_weights(weights / "two", version=version)
                (choice,) = (await agent.chat.completions.create(model="synthetic", messages=history)).choices
                history = [*history, choice.message.model_dump(exclude_none=True), USER]
        (sample,) = await owner.samples(session)
    assert sample["kv_version_spans"] == [[[0, 0]], [[0, 7]]]
    sampled = zip(sample["weight_versions"], sample["turn_of_token"], sample["loss_mask"], strict=True)
    assert {(version, turn) for version, turn, is_sampled in sampled if is_sampled} == {(0, 0), (7, 1)}


async def test_samples_are_recorded_as_parquet(serve: Serving, tmp_path: Path, writes: list[str]) -> None:
    """The record of a run has the samples of sessions, with their experts, and reads them as they were."""
    writes += [write_call(1, 2), "It is 3.", "No."]
    async with serve() as (http, _), open_session(http.url, routed_experts=True) as session:
        async with openai.AsyncOpenAI(base_url=session.url, api_key=session.api_key) as agent:
            asked: Any = {"model": "synthetic", "messages": [USER], "tools": [TOOL]}
            (choice,) = (await agent.chat.completions.create(**asked)).choices
            call = choice.message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3"}
            await agent.chat.completions.create(**{**asked, "messages": [USER, call, result]})
            await agent.chat.completions.create(**{**asked, "tools": []})
        await session.set_reward(0.5)
        with RunRecorder(tmp_path / "record", experts=True) as recorder:
            samples = await session.record(recorder)
    assert len(list((tmp_path / "record").glob("sessions-*.parquet"))) == 1
    record = rollbus.read_record(tmp_path / "record")
    rows = list(record.sessions())
    assert record.problems == []
    assert len(rows) == len(samples) == 2
    for row, each in zip(rows, samples, strict=True):
        assert (row["session"], row["leaf"], row["reward"]) == (session.id, each.details["leaf"], 0.5)
        for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
            assert np.array_equal(row[name], getattr(each.sample, name)), name
        assert np.array_equal(row["routed_experts"], each.sample.routed_experts)
        for name in ("turns", "turn_of_token", "joins", "attempts", *SPANS):
            assert row[name] == each.details[name], name
        assert json.loads(row["messages"]) == each.details["messages"]
        assert json.loads(row["forks"]) == each.details["forks"]
