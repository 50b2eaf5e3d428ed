"""What stands in a request to `anyformer serve` is honoured or refused, over HTTP."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from .conftest import messages, post

pytest.importorskip("fastapi", reason="needs the packages of the server: pip install 'anyformer[serving]'")

COUNT = messages("count")
CHAT = "/v1/chat/completions"


@pytest.fixture(params=["anyformer", "anyformer, batching"])
def either(request, servers):
    return servers[request.param]


@pytest.fixture
def alone(servers):
    """The server without batching, where each request chooses for itself."""
    return servers["anyformer"]


@pytest.fixture
def batching(servers):
    return servers["anyformer, batching"]


def ask(server, path=CHAT, headers=None, **fields):
    """Status, and the answer's text or the error."""
    body = fields if path != CHAT else {"messages": COUNT, "max_tokens": 12} | fields
    status, answer = post(server.url + path, body, headers)
    fields = json.loads(answer) if answer.startswith("{") else {"error": answer}
    if status != 200:
        return status, fields["error"]
    choice = fields["choices"][0] if "choices" in fields else None
    text = fields["output"][0]["content"][0]["text"] if choice is None else None
    return status, text if choice is None else choice["message"]["content"] if "message" in choice else choice["text"]


def settings(**values):
    """A request's `generation_config`."""
    return {"generation_config": json.dumps(values)}


# In `generation_config`, for everybody.
BAD_SETTINGS = {
    "bad_words_ids": [[10**9]],
    "forced_eos_token_id": "x",
    "cache_config": {"bits": 99},
    "cache_implementation": "nonsense",
    "prompt_lookup_num_tokens": 2,
    "prefill_chunk_size": 2,
    "dola_layers": "high",
    "num_beams": 2,
    "num_return_sequences": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "x",
    "return_dict_in_generate": True,
    "token_healing": True,
    "max_length": 7,
    "max_time": "x",
    "use_cache": False,
    "compile_config": {},
    "continuous_batching_config": {},
    "guidance_scale": 0,
    "tempratur": None,
    "do_sample": "yes",
    "temperature": -1,
    "top_k": -3,
    "top_p": 5,
    "min_p": 7,
    "typical_p": "x",
    "repetition_penalty": 0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 10**6,
    "max_new_tokens": 10**6,
    "stop_strings": [""],
    "eos_token_id": 10**6,
    "pad_token_id": -5,
}


@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_are_not_honoured_are_named(either, stream):
    for name, value in BAD_SETTINGS.items():
        given = {"max_new_tokens": 5} | {name: value}
        status, error = ask(either, stream=stream, **settings(**given))
        assert status == 400, (name, error)
        assert name in error["message"], error
        assert error["param"] in ("generation_config", f"generation_config.{name}") or name == "stop_strings"
    for text in (
        "[]",
        "null",
        '{"temperature": NaN}',
        '{"num_beams": 1.0}',
        '{"do_sample": true, "temperature": 1e-300}',
    ):
        assert ask(either, generation_config=text)[0] == 400, text


def test_a_refusal_says_what_would_be_right(alone):
    for given, message in (
        ({"num_beams": 2}, "generation_config: num_beams=2 is not supported by this server: leave it out, or send 1"),
        ({"top_p": 5}, "generation_config.top_p: Input should be less than or equal to 1"),
        ({"top_k": 5}, "generation_config.top_k: has no effect without do_sample: true"),
        (
            {"do_sample": True, "temperature": 0},
            "generation_config.temperature: at 0 nothing is drawn: set do_sample to false",
        ),
        (
            {"min_new_tokens": 9, "max_new_tokens": 5},
            "generation_config: min_new_tokens=9 is more than max_new_tokens=5",
        ),
    ):
        assert ask(alone, **settings(**given))[1]["message"] == message


def test_settings_of_the_librarys_client_are_taken(either, learned):
    """What `transformers chat` sends by itself, what stands in the folder, and every default written out."""
    from transformers import GenerationConfig

    chat = GenerationConfig()
    chat.update(do_sample=False, max_new_tokens=12)
    everything = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    saved = (learned.folder / "generation_config.json").read_text()
    for text in ("{}", chat.to_json_string(), saved, json.dumps(everything)):
        assert ask(either, generation_config=text) == (200, learned.answer(COUNT, 12)), text


HONOURED = {
    "min_new_tokens": {"min_new_tokens": 40},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "stop_strings": {"stop_strings": ["three"]},
    "eos_token_id": {"eos_token_id": None},
    "top_k": {"do_sample": True, "temperature": 2.0, "top_k": 7},
    "top_p": {"do_sample": True, "temperature": 2.0, "top_p": 0.8, "top_k": 0},
    "min_p": {"do_sample": True, "temperature": 2.0, "min_p": 0.01},
    "typical_p": {"do_sample": True, "temperature": 2.0, "typical_p": 0.9},
}


@pytest.mark.parametrize("name", HONOURED)
def test_settings_are_those_of_generate(alone, learned, name):
    import torch

    given = dict(HONOURED[name])
    turns = messages("the dog") if name == "min_new_tokens" else COUNT
    if name == "eos_token_id":
        given[name] = learned.tokenizer(" four")["input_ids"]
    torch.manual_seed(5)
    expected = learned.answer(turns, 50, **given)
    torch.manual_seed(5)
    assert expected != learned.answer(turns, 50, **{key: value for key, value in given.items() if key != name})
    assert ask(alone, messages=turns, max_tokens=50, seed=5, **settings(**given)) == (200, expected)


def test_a_temperature_asks_to_draw(alone, learned):
    import torch

    for fields, options in (
        ({"temperature": 1.8}, {"temperature": 1.8}),
        ({"top_p": 0.99, "generation_config": '{"temperature": 1.9}'}, {"top_p": 0.99, "temperature": 1.9}),
    ):
        torch.manual_seed(3)
        expected = learned.answer(COUNT, 50, do_sample=True, **options)
        assert ask(alone, max_tokens=50, seed=3, **fields) == (200, expected)
    greedy = learned.answer(COUNT, 50)
    assert ask(alone, max_tokens=50, temperature=0, top_p=0.9) == (200, greedy)
    assert ask(alone, max_tokens=50, **settings(do_sample=False, temperature=0.7)) == (200, greedy)


def test_what_is_drawn_after_a_seed_does_not_start_from_it(alone):
    drawn = {}
    for _ in range(4):
        seeded = ask(alone, max_tokens=50, seed=3, temperature=2)
        drawn[ask(alone, max_tokens=50, temperature=2)] = seeded
    assert len(drawn) > 1 and len(set(drawn.values())) == 1
    assert all(status == 200 for status, _ in drawn)


def test_a_body_of_unknown_length_is_not_read(alone):
    host = alone.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", "/v1/chat/completions", iter([b"{}"]), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400 and "Content-Length" in answer.read().decode()


def test_a_bias_holds_at_both_endpoints(alone, learned):
    (token,) = learned.tokenizer("#")["input_ids"]
    bias = {"logit_bias": {str(token): 100}, "max_tokens": 3}
    assert ask(alone, **bias) == ask(alone, "/v1/completions", prompt="one", **bias) == (200, "###")


ALIKE = {
    "temperature": {"temperature": 1},
    "top_p": {"top_p": 0.9},
    "seed": {"seed": 1},
    "stop": {"stop": "three"},
    "logit_bias": {"logit_bias": {"5": 1}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "generation_config.do_sample": settings(do_sample=True),
    "generation_config.temperature": settings(temperature=0.7),
    "generation_config.repetition_penalty": settings(repetition_penalty=1.2),
    "generation_config.no_repeat_ngram_size": settings(no_repeat_ngram_size=2),
    "generation_config.min_new_tokens": settings(min_new_tokens=3),
    "generation_config.stop_strings": settings(stop_strings="three"),
}


def test_batching_refuses_what_it_would_ignore(batching, learned):
    for field, fields in ALIKE.items():
        status, error = ask(batching, **fields)
        assert (status, error["param"]) == (400, field), error
    # Of a request's own there are its length and its stop tokens.
    (four,) = learned.tokenizer(" four")["input_ids"]
    expected = learned.answer(COUNT, 40, eos_token_id=four)
    assert ask(batching, max_tokens=40, **settings(eos_token_id=four)) == (200, expected)
    body = {"messages": COUNT} | settings(max_new_tokens=4)
    status, answer = post(batching.url + CHAT, body)
    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 4)
    for fields in ({"temperature": 0}, {"frequency_penalty": 0}, settings(do_sample=False, temperature=0.7, top_k=5)):
        assert ask(batching, **fields) == (200, learned.answer(COUNT, 12))


BAD = {
    "model": {"model": ""},
    "chat_template_kwargs": {"chat_template_kwargs": {"tokenize": False}},
    "logit_bias.5": {"logit_bias": {"5": 1e300}},
    "logit_bias.5x": {"logit_bias": {"5x": 1}},
    "stop": {"stop": [str(i) for i in range(500)]},
    "stop.0": {"stop": ["a" * 5000]},
    "temperature": {"temperature": 1e-300},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},  # the template has no place for them
    "tools.0.type": {"tools": [{}]},
    "parallel_tool_calls": {"parallel_tool_calls": "x"},
    "reasoning_effort": {"reasoning_effort": "high"},
    "store": {"store": True},
    "stream_options": {"stream_options": "x"},
    "max_completion_tokens": {"max_completion_tokens": 5, "max_tokens": 6},
    "messages.0": {"messages": [{"role": "user", "content": "one", "name": "Ada"}]},
    "messages.0.content": {"messages": [{"role": "user", "content": 3}]},
    "messages.0.tool_calls.0.function.arguments": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
}
BAD_INPUT = {
    "tools.0.type": {"tools": [{"type": "web_search"}]},
    "parallel_tool_calls": {"parallel_tool_calls": "x"},
    "reasoning": {"reasoning": {"effort": "high"}},
    "text": {"text": {"format": {"type": "json_object"}}},
    "input.1.arguments": {
        "input": [
            {"role": "user", "content": "one"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
        ]
    },
    None: {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]},
}


def test_what_nobody_would_read_is_refused(either):
    for field, fields in BAD.items():
        status, error = ask(either, **fields)
        assert (status, error["param"]) == (400, field), error
    for field, fields in BAD_INPUT.items():
        status, error = ask(either, "/v1/responses", **{"input": "one", "stream": False} | fields)
        assert (status, error["param"]) == (400, field), error
    for name in ("tokenize", "chat_template", "truncation", "add_generation_prompt", "messages", "bos_token", "x"):
        assert ask(either, chat_template_kwargs={name: 1})[0] == 400, name
    for body in (b"[" * 100_000, b'{"messages": "\xe9"}', b'{"\\ud800": 1}', b'{"max_tokens": 1' + b"0" * 9000 + b"}"):
        assert post(either.url + CHAT, body)[0] == 400
    assert post(either.url + "/v1/systemone", b'{"state": "\\ud800", "questions": {}}')[0] == 400


def test_what_says_nothing_is_taken(either, learned):
    expected = 200, learned.answer(COUNT, 12)
    nothing = {"logit_bias": {}, "chat_template_kwargs": None, "tools": [], "n": 1, "stop": None, "metadata": None}
    assert ask(either, **nothing) == expected
    assert ask(either, user="x", stream_options={"include_usage": True}, response_format={"type": "text"}) == expected
    assert ask(either, "/v1/responses", input="the dog", stream=False, parallel_tool_calls=None, tools=[]) == (
        200,
        "sat on the log",
    )


def test_requests_at_once_have_each_its_own_settings(alone, learned):
    asked = [
        {"seed": seed, "temperature": 2, "max_tokens": 40} if seed else {"max_tokens": 40, **extra}
        for seed, extra in (
            (1, {}),
            (0, {}),
            (2, {}),
            (0, {"stop": "three"}),
            (3, {}),
            (0, settings(no_repeat_ngram_size=2)),
        )
    ]
    expected = [ask(alone, **fields) for fields in asked]
    assert len({text for _, text in expected}) == len(asked)
    assert expected[1] == (200, learned.answer(COUNT, 40))
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda fields: ask(alone, **fields), asked * 2)) == expected * 2


def test_requests_may_have_one_id(either, learned):
    turns = [messages("the dog"), COUNT, messages("one")] * 3
    with ThreadPoolExecutor(9) as pool:
        found = pool.map(lambda asked: ask(either, messages=asked, headers={"x-request-id": "one"}), turns)
        assert list(found) == [(200, learned.answer(asked, 12)) for asked in turns]


def test_a_stream_that_the_client_cuts_ends_nothing_else(either):
    address = urlsplit(either.url)
    body = json.dumps({"messages": COUNT, "stream": True, "max_tokens": 200}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            assert connection.recv(300).startswith(b"HTTP/1.1 200")
        assert ask(either, messages=messages("the dog")) == (200, "sat on the log")


def test_the_longest_text_is_that_of_training(either, learned):
    """With an answer that would go on: the stop token is one that does not come."""
    ends = settings(eos_token_id=learned.tokenizer("#")["input_ids"], max_new_tokens=255)
    body = {"messages": COUNT} | ends
    usage = json.loads(post(either.url + CHAT, body)[1])["usage"]
    assert usage["total_tokens"] == 256
    for fields in ({"max_tokens": 256}, {"messages": messages("one two three " * 200)}):
        assert ask(either, **fields)[0] == 400
