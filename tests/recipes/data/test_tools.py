"""Tools, tool calls and their results, in OpenAI's form and in ShareGPT's."""

import functools
import json

import pytest
from data_rows import CHAT, rows_of, section, write_rows

from anyformer.recipes.data import load_splits
from anyformer.recipes.errors import UserError

ASK = {"role": "user", "content": "Weather?"}
ARGUMENTS = {"city": "Köln", "days": 2}
CALL = {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12", "tool_call_id": "call_1", "name": "weather"}
REPLY = {"role": "assistant", "content": "It is 12 degrees."}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
TALK = [ASK, CALLING, RESULT, REPLY]


@pytest.fixture
def write(tmp_path_factory):
    """Without the test's parameters in the folder's name, where the secret would be found."""
    return functools.partial(write_rows, tmp_path_factory.mktemp("tools"))


def called(**changed):
    """A conversation that ends with a call, as files have it."""
    return [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL | changed]}]


@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [TOOL["function"]], json.dumps([TOOL["function"]]), [json.dumps(TOOL)]],
    ids=["objects", "JSON text", "bare functions", "bare functions as text", "a text each"],
)
def test_openai_messages_with_tools(write, tools):
    text = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    written = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": text}]}, RESULT, REPLY]
    for messages in (TALK, written):
        splits = load_splits(section(write("a.jsonl", [{"messages": messages, "tools": tools}])))
        assert splits.train == [{"messages": TALK, "tools": [TOOL]}]
        assert (splits.report.recognised, splits.report.ignored_columns) == ("messages", [])


def test_sharegpt_with_tools(write):
    call = {"name": "weather", "arguments": ARGUMENTS}
    turns = [
        ("human", "Weather?"),
        ("function_call", json.dumps(call)),
        ("observation", "12"),
        ("gpt", REPLY["content"]),
    ]
    row = {
        "conversations": [{"from": name, "value": text} for name, text in turns],
        "tools": json.dumps([TOOL["function"]]),
        "system": "Be brief.",
    }
    (found,) = rows_of(write("a.jsonl", [row]))
    bare = CALLING | {"tool_calls": [{"type": "function", "function": CALL["function"]}]}
    system = {"role": "system", "content": "Be brief."}
    assert found == {"messages": [system, ASK, bare, {"role": "tool", "content": "12"}, REPLY], "tools": [TOOL]}
    several = dict(
        row, conversations=[*row["conversations"][:1], {"from": "function_call", "value": json.dumps([call] * 2)}]
    )
    (found,) = rows_of(write("b.jsonl", [several]))
    assert [made["function"] for made in found["messages"][-1]["tool_calls"]] == [CALL["function"]] * 2


def test_tools_come_along_in_every_form_of_messages(write):
    answers = {"chosen": [CALLING], "rejected": [REPLY]}
    rows = {
        "prompt-completion": {"prompt": [ASK], "completion": [CALLING]},
        "preference": {"prompt": [ASK], **answers},
        "unpaired-preference": {"prompt": [ASK], "completion": [CALLING], "label": True},
        "scored": {"prompt": [ASK], "completions": [[CALLING], [REPLY]], "scores": [1.0, 0.0]},
    }
    for name, row in rows.items():
        splits = load_splits(section(write(f"{name}.jsonl", [row | {"tools": [TOOL]}])))
        assert splits.train == [row | {"tools": [TOOL]}] and splits.report.format == name
    implicit = write("implicit.jsonl", [{"chosen": [ASK, CALLING], "rejected": [ASK, REPLY], "tools": [TOOL]}])
    assert rows_of(implicit) == [rows["preference"] | {"tools": [TOOL]}]
    scored = write("pairs.jsonl", [rows["scored"] | {"tools": [TOOL]}])
    assert rows_of(scored, ["preference"]) == [rows["preference"] | {"tools": [TOOL], "margin": 1.0}]
    chosen = rows_of(implicit, format="prompt-completion")
    assert chosen == [rows["prompt-completion"] | {"tools": [TOOL]}]


@pytest.mark.parametrize("nothing", [None, "", [], "[]"])
def test_no_tools_are_no_tools(write, nothing):
    messages = [{**message, "tool_calls": nothing if nothing != "[]" else None} for message in CHAT]
    assert rows_of(write("a.jsonl", [{"messages": messages, "tools": nothing}])) == [{"messages": CHAT}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": called(function={"name": "", "arguments": {}})}, r"tool_calls\[0\]\.function\.name is empty"),
        (
            {"messages": called(function={"name": "f", "arguments": "hunter2"})},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is text that is no JSON",
        ),
        (
            {"messages": called(function={"name": "f", "arguments": '{"city": "hunter2", "city": "Rome"}'})},
            r"function\.arguments is text that is no JSON: duplicate key: city",
        ),
        (
            {"messages": called(function={"name": "f", "arguments": '{"days": 1e999}'})},
            r"function\.arguments is text that is no JSON: a number is too large",
        ),
        (
            {"messages": called(function={"name": "f", "arguments": "[1]"})},
            r"function\.arguments must be an object, or one as JSON text, found a list",
        ),
        ({"messages": called(function={"name": "f"})}, r"arguments must be an object, or one as JSON text, found null"),
        ({"messages": called(function="hunter2")}, r"tool_calls\[0\]\.function must be an object with name and arg"),
        ({"messages": called(type="retrieval")}, r"tool_calls\[0\]\.type must be function"),
        ({"messages": called(id=3)}, r"tool_calls\[0\]\.id must be text, found a number"),
        (
            {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": "hunter2"}]},
            r"messages\[1\]\.tool_calls must be a list of calls, found text",
        ),
        (
            {"messages": [ASK | {"tool_calls": [CALL]}, REPLY]},
            r"messages\[0\] has tool_calls, which only an assistant's message may have",
        ),
        (
            {"messages": [ASK, REPLY | {"reasoning_content": "hunter2"}]},
            r"messages\[1\] has reasoning_content, .*write it into content",
        ),
        (
            {"messages": [ASK, REPLY | {"function_call": {"name": "f"}}]},
            r"messages\[1\] has function_call, .*tool_calls",
        ),
        ({"messages": [ASK, CALLING, RESULT]}, r"must end with an assistant message, ends with tool"),
        ({"messages": [ASK, CALLING, RESULT | {"content": None}, REPLY]}, r"messages\[2\]\.content must be text"),
        ({"messages": [ASK, CALLING, RESULT | {"name": 3}, REPLY]}, r"messages\[2\]\.name must be text"),
        (
            {"messages": [ASK, {"role": "assistant", "content": None}]},
            r"messages\[1\]\.content must be text, found null",
        ),
        ({"messages": TALK, "tools": "hunter2"}, "tools is text that is no JSON"),
        ({"messages": TALK, "tools": {"name": "f"}}, "tools must be a list of functions, .* found an object"),
        ({"messages": TALK, "tools": [{"type": "retrieval"}]}, r"tools\[0\]\.type must be function"),
        ({"messages": TALK, "tools": [{"parameters": {}}]}, r"tools\[0\]\.name must be text, found null"),
        (
            {"messages": TALK, "tools": [{"name": "f", "parameters": ["hunter2"]}]},
            r"tools\[0\]\.parameters must be a JSON schema, found a list",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "hunter2"}]},
            r"conversations\[1\]\.value is text that is no JSON",
        ),
        ({"prompt": "p", "completion": "c", "tools": [TOOL]}, "tools are offered in conversations"),
    ],
)
def test_a_bad_row_is_named_with_its_place(write, row, reason):
    good = {"messages": CHAT} if "prompt" not in row else {"prompt": "p", "completion": "c"}
    path = write("a.jsonl", [good, row])
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: .*{reason}") as error:
        rows_of(path)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "row", [{"prompt": [ASK], "tools": [TOOL]}, {"prompt": [ASK, CALLING, RESULT]}], ids=["tools", "calls"]
)
def test_sampled_answers_have_no_tools(write, row):
    with pytest.raises(
        UserError, match="line 1: prompt has tools or tool_calls, which are not supported where answers"
    ):
        rows_of(write("a.jsonl", [row]), ["prompt"])
