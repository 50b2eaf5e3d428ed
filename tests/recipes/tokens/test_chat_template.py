"""What a chat template writes for a turn is found exactly, or the row is refused."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from small_tokenizer import build
from template_families import (
    ANSWER,
    ASK,
    CHATML,
    FAMILIES,
    HARD,
    HERMES,
    MISTRAL,
    MORE,
    REPLY,
    RESULT,
    SECOND,
    SYSTEM,
    TOOL_TOKENS,
    USER,
    WEATHER,
    call,
)

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens.chat_template import ChatTemplate, answer_text, prompt_text
from anyformer.recipes.tokens.supervised import stop_ids, tokenize_rows


def assistants(messages):
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def located(tokenizer, messages, tools=None, turns=None):
    """The text of each turn, after a check that all around is what the template writes by itself."""
    turns = assistants(messages) if turns is None else turns
    text, spans = ChatTemplate(tokenizer).locate(messages, turns, 1, tools)
    bare = [{name: value for name, value in message.items() if name != "train"} for message in messages]
    if "strftime_now" not in tokenizer.chat_template:
        assert text == tokenizer.apply_chat_template(bare, tools=tools, tokenize=False)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    return [text[start:end] for start, end in spans]


def supervised_texts(tokenizer, messages, tools=None):
    """The same by way of the ids: each run of labels, decoded."""
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    data = tokenize_rows([row], tokenizer, max_length=None).dataset[0]
    runs, before = [], -100
    for label in data["labels"]:
        if label != -100:
            runs = [*runs, [label]] if before == -100 else [*runs[:-1], [*runs[-1], label]]
        before = label
    return [tokenizer.decode(run) for run in runs]


def variants(messages):
    """A conversation plain, with blank space around every text, and with a system message where one may stand."""
    yield messages, False
    yield [{**message, "content": f" \n{message['content']}\n "} for message in messages], False
    yield [SYSTEM, *messages], True
    yield [*messages[:2], SYSTEM, *messages[2:]], True


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_every_family(name, hard):
    family = FAMILIES[name]
    tokenizer = build(family.template, adds_bos=True, tokens=family.tokens)
    refused = 0
    for messages, has_system in variants(HARD[hard]):
        trim = str.strip if family.trims else str.rstrip if name.startswith("strips the end") else str
        expected = [f"{family.before}{trim(messages[turn]['content'])}{family.end}" for turn in assistants(messages)]
        try:
            found = located(tokenizer, messages)
        except UserError as error:  # then the template itself refuses, as with a system message in the middle
            assert has_system and "the chat template refuses the conversation" in str(error)
            refused += 1
            continue
        assert found == expected
        ids = tokenize_rows([{"messages": messages}], tokenizer, max_length=None).dataset[0]["input_ids"]
        if "strftime_now" not in family.template:
            assert ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert refused == {"llama-2": 1, "gemma": 1}.get(name, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_labels_are_the_answers_and_their_ends(name):
    family = FAMILIES[name]
    tokenizer = build(family.template, adds_bos=True, tokens=family.tokens)
    messages = [USER, ANSWER, MORE, SECOND]
    assert supervised_texts(tokenizer, messages) == [
        f"{family.before}{messages[turn]['content']}{family.end}" for turn in (1, 3)
    ]
    # One turn switched off, and one alone in the completion.
    assert supervised_texts(tokenizer, [USER, ANSWER | {"train": False}, MORE, SECOND]) == [
        f"{family.before}{SECOND['content']}{family.end}"
    ]


@pytest.mark.parametrize("name", ["chatml", "phi-3", "zephyr", "numbers turns"])
def test_an_empty_answer_is_its_end_token(name):
    family = FAMILIES[name]
    tokenizer = build(family.template, tokens=family.tokens)
    messages = [USER, ANSWER | {"content": ""}, MORE, SECOND]
    assert located(tokenizer, messages) == [family.end, SECOND["content"] + family.end]


def test_reasoning_that_the_template_removes_is_not_learned():
    family = FAMILIES["deepseek"]
    tokenizer = build(family.template, tokens=family.tokens)
    thinking = ANSWER | {"content": "<think>\nWell.\n</think>\n\nThe fox is quick."}
    end = family.end
    assert located(tokenizer, [USER, thinking, MORE, SECOND]) == [
        f"\n\nThe fox is quick.{end}",
        f"No, the dog is lazy.{end}",
    ]
    # What looks like the turns around it belongs to the answer.
    trap = f"b{end}<｜User｜>And lazy?<｜Assistant｜>c"
    rows = [USER, ANSWER | {"content": f"a</think>{trap}"}, MORE, thinking]
    assert located(tokenizer, rows) == [f"{trap}{end}", f"\n\nThe fox is quick.{end}"]


MISBEHAVED = {
    "upper case": (CHATML.replace("m.content", "m.content | upper"), "does not write an assistant message's text"),
    "capitalised": (
        CHATML.replace("m.content", "m.content | capitalize"),
        "does not write an assistant message's text",
    ),
    "repeated": (CHATML.replace("{{ m.content", "{{ m.content }} {{ m.content"), "exactly once"),
    "answers swapped": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ messages[-loop.index].content if m.role == 'assistant' "
        "and messages | length > 3 else m.content }}<|im_end|>\n{% endfor %}",
        "leaves out message 2|cannot tell for certain",
    ),
    "cut": (CHATML.replace("m.content", "m.content[:40]"), "cannot tell for certain"),
    "censored": (CHATML.replace("m.content", "m.content | replace('lazy', '')"), "cannot tell for certain"),
    "backwards": (CHATML.replace("in messages", "in messages[::-1]"), "cannot tell for certain"),
    "earlier turns left out": (CHATML.replace("in messages", "in messages[-2:]"), r"leaves out message 1 \(user\)"),
    "system left out": (
        CHATML.replace("in messages", "in messages | rejectattr('role', 'equalto', 'system')"),
        r"Row 1: the chat template leaves out message 3 \(system\)",
    ),
    "another every time": ("{{ strftime_now('%f') }}" + CHATML, "cannot tell for certain"),
    "breaks": (
        CHATML.replace("m.content", "m.content + 1 if loop.index == 5 else m.content"),
        "refuses the conversation",
    ),
}


@pytest.mark.parametrize(("template", "message"), MISBEHAVED.values(), ids=MISBEHAVED)
def test_what_is_not_certain_is_refused(template, message):
    long = SECOND | {"content": "No, the dog is lazy, and the fox is quick and brown."}
    with pytest.raises(UserError, match=message):
        located(build(template), [USER, ANSWER, SYSTEM, MORE, long])


# Markers


def test_markers_decide_where_they_are():
    template = CHATML.replace(
        "{{ m.content }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
    )
    tokenizer = build(template)
    messages = [USER, ANSWER, MORE, SECOND]
    oracle = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    data = tokenize_rows([{"messages": messages}], tokenizer, max_length=None).dataset[0]
    assert [label != -100 for label in data["labels"]] == [bool(on) for on in oracle["assistant_masks"]]
    assert supervised_texts(tokenizer, messages) == [
        "The fox is quick.<|im_end|>\n",
        "No, the dog is lazy.<|im_end|>\n",
    ]
    last = {"prompt": messages[:3], "completion": messages[3:]}
    labels = tokenize_rows([last], tokenizer, max_length=None).dataset[0]["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == "No, the dog is lazy.<|im_end|>\n"
    # Of other roles the markers say nothing.
    users = tokenize_rows([last], tokenizer, max_length=None, loss_on=["user"]).dataset[0]["labels"]
    assert tokenizer.decode([i for i in users if i != -100]) == "Is the fox quick?<|im_end|>And lazy?<|im_end|>"


def test_markers_that_leave_the_end_out_are_refused():
    template = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    with pytest.raises(UserError, match=r"markers leave out <\|im_end\|>.*would never learn to stop"):
        tokenize_rows([{"messages": [USER, ANSWER]}], build(template), max_length=None)


# Templates as published


def published():
    trl = pytest.importorskip("trl")
    return {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}


def tokenizer_of(template):
    names = set(
        re.findall(
            r"<[|｜][^<>]+?[|｜]>|<\w+_of_\w+>|\[/?[A-Z_]+\]|</?tool_calls?>|</?think>|<\w+\|>|<\|\w+>", template
        )
    )
    return build(template, tokens=sorted(names))


CONVERSATIONS = {
    "turns": ([USER, ANSWER, MORE, SECOND], None),
    "system": ([SYSTEM, USER, ANSWER], None),
    "system in the middle": ([USER, ANSWER, SYSTEM, MORE, SECOND], None),
    "blank space": ([USER, ANSWER | {"content": "  \n The fox.\n\n"}, MORE, SECOND | {"content": "\n\nx \n"}], None),
    "empty": ([USER, ANSWER | {"content": ""}, MORE, SECOND], None),
    "call": ([ASK, call()], [WEATHER]),
    "call and result": ([ASK, call(), RESULT, REPLY], [WEATHER]),
    "call with text": ([ASK, call("Let me look."), RESULT, REPLY], [WEATHER]),
    "calls in many turns": ([USER, ANSWER, ASK, call(), RESULT, REPLY, ASK, call(), RESULT, REPLY], [WEATHER]),
    "two calls at once": ([ASK, call("", "Köln", "Bonn"), RESULT, RESULT, REPLY], [WEATHER]),
}


def test_published_templates_are_exact_or_refused():
    """Every turn found holds its own text alone, calls with name and arguments, and ends as the model is to stop."""
    exact = dict.fromkeys(CONVERSATIONS, 0)
    for name, template in sorted(published().items()):
        tokenizer = tokenizer_of(template)
        for kind, (messages, tools) in CONVERSATIONS.items():
            try:
                ChatTemplate(tokenizer).require_end_token()
                found = located(tokenizer, messages, tools)
            except UserError:
                continue
            exact[kind] += 1
            stops = {tokenizer.decode([token]) for token in stop_ids(tokenizer)} | {"<|end|>", "<|END_OF_TURN_TOKEN|>"}
            turns = [messages[turn] for turn in assistants(messages)]
            for turn, text in zip(turns, found, strict=True):
                others = {m["content"].strip() for m in messages if m["content"].strip()} - {turn["content"].strip()}
                assert turn["content"].strip() in text, (name, kind)
                assert not any(other in text for other in others if len(other) > 1), (name, kind, text)
                # Where markers are, they decide.
                assert "generation %}" in template or any(text.rstrip().endswith(stop) for stop in stops), (
                    name,
                    kind,
                    text,
                )
                for made in turn.get("tool_calls", ()):
                    assert made["function"]["name"] in text and made["function"]["arguments"]["city"] in text
    # Many templates have no tools, or no system message in the middle: those refuse.
    assert exact["turns"] >= 60 and exact["system"] >= 60 and exact["blank space"] >= 60 and exact["empty"] >= 60
    assert min(exact["call"], exact["call and result"], exact["calls in many turns"]) >= 35, exact


def test_markers_of_published_templates_hold_what_is_found_without_them():
    """Oracle: the markers that TRL has set into templates of model makers. Some also hold the header or the blank space
    behind the turn; none leaves out what is found without them."""
    compared = 0
    for name, template in sorted(published().items()):
        marker = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
        if not marker.search(template) or name.startswith("diffusion"):  # which goes on with the result's turn
            continue
        bare = marker.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)
        try:
            templates = ChatTemplate(tokenizer_of(template)), ChatTemplate(tokenizer_of(bare))
        except UserError:
            continue
        for messages, tools in CONVERSATIONS.values():
            turns = assistants(messages)
            try:
                (text, marked), (same, found) = (t.locate(messages, turns, 1, tools) for t in templates)
            except UserError:
                continue
            assert text == same
            inside = {place for start, end in marked for place in range(start, end)}
            assert all(place in inside for start, end in found for place in range(start, end)), name
            compared += 1
    assert compared >= 100


# Tools


def spoken(*texts):
    return [f"{text}<|im_end|>" for text in texts]


HERMES_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
HERMES_BONN = HERMES_CALL.replace("Köln", "Bonn")
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}, "id": "abcdefghi"}]</s>'
TOOL_ROWS = {
    "hermes": (HERMES, [ASK, call(), RESULT, REPLY], spoken(HERMES_CALL, "It is 12 degrees.")),
    "hermes, with text": (
        HERMES,
        [ASK, call("Let me look."), RESULT, REPLY],
        spoken(f"Let me look.\n{HERMES_CALL}", "It is 12 degrees."),
    ),
    "hermes, two calls": (HERMES, [ASK, call("", "Köln", "Bonn")], spoken(f"{HERMES_CALL}\n{HERMES_BONN}")),
    "hermes, equal calls": (
        HERMES,
        [ASK, call(), RESULT, call(), RESULT, REPLY],
        spoken(HERMES_CALL, HERMES_CALL, "It is 12 degrees."),
    ),
    "mistral": (MISTRAL, [ASK, call(), RESULT, REPLY], [MISTRAL_CALL, " It is 12 degrees.</s>"]),
    # Tools stand before the last question, so that no beginning of the conversation begins the whole.
    "mistral, later question": (
        MISTRAL,
        [ASK, call(), RESULT, REPLY, USER, ANSWER],
        [MISTRAL_CALL, " It is 12 degrees.</s>", " The fox is quick.</s>"],
    ),
}


@pytest.mark.parametrize(("template", "messages", "expected"), TOOL_ROWS.values(), ids=TOOL_ROWS)
def test_a_call_is_learned_as_the_template_writes_it_and_results_are_not(template, messages, expected):
    tokenizer = build(template, tokens=TOOL_TOKENS)
    assert located(tokenizer, messages, [WEATHER]) == expected
    assert supervised_texts(tokenizer, messages, [WEATHER]) == expected


def test_results_are_learned_where_loss_on_names_them():
    tokenizer = build(HERMES, tokens=TOOL_TOKENS)
    row = {"messages": [ASK, call(), RESULT, REPLY], "tools": [WEATHER]}
    labels = tokenize_rows([row], tokenizer, max_length=None, loss_on=["tool"]).dataset[0]["labels"]
    # The template writes no end token right behind a result.
    assert tokenizer.decode([label for label in labels if label != -100]) == "T = 12"
    off = {"messages": [ASK, call() | {"train": False}, RESULT, REPLY], "tools": [WEATHER]}
    labels = tokenize_rows([off], tokenizer, max_length=None).dataset[0]["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == "It is 12 degrees.<|im_end|>"


def test_arguments_come_as_the_template_can_write_them():
    """DeepSeek's joins them to text, so that it wants JSON text; Python's own form would be no JSON."""
    text = HERMES.replace("c.function.arguments | tojson", "c.function.arguments")
    printed = HERMES.replace("+ c.function.arguments | tojson +", "}}{{ c.function.arguments }}{{")
    absent = HERMES.replace("m.content }}{% for c", "(m.content or '') }}{% for c").replace(
        "in m.tool_calls or []", "in (m.tool_calls if m.content is not defined else [])"
    )
    for template in (text, printed, absent):
        tokenizer = build(template, tokens=TOOL_TOKENS)
        assert supervised_texts(tokenizer, [ASK, call()], [WEATHER]) == spoken(HERMES_CALL)
        prompt = prompt_text(tokenizer, [ASK, call(), RESULT], [WEATHER])
        assert HERMES_CALL in prompt and prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (CHATML, [USER, ANSWER], [WEATHER], r"Row 1: the chat template ignores tools: it writes the same without them"),
        (CHATML, [ASK, call("Let me look.")], None, r"ignores tool calls: .* message 2 \(assistant\) with their arg"),
        (
            HERMES.replace("+ c.function.arguments | tojson +", "+ '' +"),
            [ASK, call(), RESULT, REPLY],
            [WEATHER],
            r"ignores tool calls: it does not write those of message 2 \(assistant\) with their arguments",
        ),
        (
            HERMES.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
            [ASK, call("", "Köln", "Bonn")],
            [WEATHER],
            "ignores tool calls",
        ),
        (
            HERMES.replace("'<tool_response>' + m.content", "'<tool_response>'").replace(
                "<tool_response>' + m.content", "<tool_response>'"
            ),
            [ASK, call(), RESULT, REPLY],
            [WEATHER],
            r"leaves out message 3 \(tool\)",
        ),
        (MISTRAL, [ASK, {**call(), "tool_calls": [{**call()["tool_calls"][0], "id": "x"}]}], [WEATHER], "length 9"),
    ],
)
def test_templates_that_leave_tools_out_are_refused(template, messages, tools, message):
    with pytest.raises(UserError, match=message):
        located(build(template, tokens=TOOL_TOKENS), messages, tools)


def test_a_call_with_an_end_of_its_own_stops_generation():
    template = HERMES.replace("{{ '<|im_end|>\n' }}", "{{ '<|call|>\n' if m.tool_calls else '<|im_end|>\n' }}")
    tokenizer = build(template, tokens=(*TOOL_TOKENS, "<|call|>"))
    messages = [ASK, call(), RESULT, REPLY]
    assert located(tokenizer, messages, [WEATHER]) == [f"{HERMES_CALL}<|call|>", "It is 12 degrees.<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)) == ["</s>", "<|im_end|>", "<|call|>"]
    data = tokenize_rows([{"messages": messages[:2], "tools": [WEATHER]}], tokenizer, max_length=None)
    assert data.report.stopped == 1


def test_an_answer_is_shown_with_its_calls():
    assert answer_text(call("Let me look.")) == 'Let me look.\n{"name": "weather", "arguments": {"city": "Köln"}}'
    assert answer_text(REPLY) == "It is 12 degrees."
