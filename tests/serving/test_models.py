"""What a server takes depends on its model: the chat template, and the settings of the folder."""

import dataclasses
from contextlib import contextmanager

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.generator import open_generator

from .conftest import messages

pytest.importorskip("fastapi", reason="needs the packages of the server: pip install 'anyformer[serving]'")

CHAT = "/v1/chat/completions"
TOOLS = """{% for tool in tools or [] %}{{ tool.function.name + tool.function.description }}{% endfor %}
{{ '' + mood }}{% for message in messages %}{{ message.content }}{% endfor %}"""


@contextmanager
def served(generator, **options):
    """A function that asks: status and what was answered."""
    from fastapi.testclient import TestClient

    from anyformer.recipes.serving.server import build_app

    app, state = build_app("model", generator, **options)

    def ask(path=CHAT, **fields):
        body = fields if path != CHAT else {"messages": messages("count"), "max_tokens": 8} | fields
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()

    try:
        with TestClient(app) as client:
            yield ask
    finally:
        state.shutdown()


@pytest.fixture
def generator(learned):
    return open_generator(str(learned.folder))


def with_template(generator, template):
    generator.tokenizer.chat_template = template
    return dataclasses.replace(generator)


def test_without_a_template_texts_alone_are_taken(generator):
    with served(with_template(generator, None)) as ask:
        status, answer = ask()
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "ask /v1/completions" in answer["error"]["message"]
        assert ask("/v1/responses", input="one", stream=False)[0] == 400
        assert ask("/v1/completions", prompt="one", max_tokens=3)[0] == 200


def test_the_template_says_what_may_be_set(generator):
    tool = {"type": "function", "function": {"name": "f", "description": "g"}}
    with served(with_template(generator, TOOLS)) as ask:
        assert ask(tools=[tool], chat_template_kwargs={"mood": "one"})[0] == 200
        status, answer = ask(chat_template_kwargs={"moood": "one"})
        assert (status, answer["error"]["message"]) == (
            400,
            "chat_template_kwargs: 'moood' is no variable of the chat template that can be set: mood",
        )
        for stumbles in (
            {"chat_template_kwargs": {"mood": 5}},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
        ):
            status, answer = ask(**{"chat_template_kwargs": {"mood": ""}} | stumbles)
            assert status == 400, answer
            assert answer["error"]["message"].startswith("the chat template cannot write these messages: ")
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        assert ask(messages=[call])[0] == 400


def test_batching_takes_the_sampling_of_the_folder(generator):
    config = generator.model.generation_config
    config.do_sample, config.temperature, config.top_k = True, 0.7, 5
    with served(generator, continuous_batching=True) as ask:
        for fields in ({}, {"temperature": 0.7}, {"generation_config": '{"do_sample": true, "top_k": 5}'}):
            assert ask(**fields)[0] == 200, fields
        for fields in ({"temperature": 1}, {"temperature": 0}, {"generation_config": '{"top_k": 50}'}):
            status, answer = ask(**fields)
            assert status == 400, fields
            assert "do_sample=True, temperature=0.7, top_k=5" in answer["error"]["message"]


def test_a_folder_with_beams_is_not_served(generator):
    generator.model.generation_config.num_beams = 3
    with pytest.raises(UserError, match="holds num_beams=3"), served(generator):
        pass
