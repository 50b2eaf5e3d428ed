"""Servers over HTTP: the library's own on a saved folder, and `anyformer serve`, asked by OpenAI's client."""

import json
import os
import pty
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from anyformer.scripts.cli import app

from .conftest import CONVERSATIONS, SERVERS, TRANSFORMERS, environment, messages, post

PACKAGES = "needs the packages of the server: pip install 'anyformer[serving]'"
pytest.importorskip("fastapi", reason=PACKAGES)
openai = pytest.importorskip("openai", reason=PACKAGES)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client, server, turns, **options):
    """Text and reason of the end."""
    choice = client.chat.completions.create(model=server.model, messages=turns, **options).choices[0]
    return choice.message.content, choice.finish_reason


def streamed(client, server, turns, **options):
    pieces, reason, usage = [], None, None
    for chunk in client.chat.completions.create(model=server.model, messages=turns, stream=True, **options):
        pieces.append(chunk.choices[0].delta.content or "")
        reason, usage = chunk.choices[0].finish_reason or reason, chunk.usage or usage
    return pieces, reason, usage


def test_the_model_is_listed(client, server):
    assert [model.id for model in client.models.list()] == [server.model]


@pytest.mark.parametrize("turns", CONVERSATIONS, ids=" / ".join)
def test_answers_are_those_of_generate_and_end_at_the_end_of_turn(client, server, learned, turns):
    """Several turns too: what the model has learned depends on the first ones."""
    asked = messages(*turns[:-1])
    assert learned.answer(asked) == turns[-1]
    assert ask(client, server, asked) == (turns[-1], "stop")
    pieces, reason, usage = streamed(client, server, asked)
    assert ("".join(pieces), reason) == (turns[-1], "stop")
    assert len(pieces) > 3
    tokens = learned.tokenizer(turns[-1], add_special_tokens=False)["input_ids"]
    assert usage.completion_tokens == len(tokens) + 1  # the end of the turn


def test_the_longest_answer_is_what_was_asked_for(client, server, learned):
    asked = messages("count")
    expected = learned.answer(asked, 7)
    assert ask(client, server, asked, max_tokens=7) == (expected, "length")
    pieces, reason, usage = streamed(client, server, asked, max_completion_tokens=7)
    assert ("".join(pieces), reason, usage.completion_tokens) == (expected, "length", 7)


def test_requests_at_once_get_each_its_own_answer(client, server):
    asked = [messages(*turns[:-1]) for turns in CONVERSATIONS] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        whole = pool.map(lambda turns: ask(client, server, turns), asked[::2])
        parts = pool.map(lambda turns: streamed(client, server, turns), asked[1::2])
        answers = [answer for answer, _ in whole], ["".join(pieces) for pieces, _, _ in parts]
    expected = [turns[-1] for turns in CONVERSATIONS] * 2
    assert answers == (expected[::2], expected[1::2])


def test_other_endpoints(client, server, learned):
    prompt = learned.tokenizer.apply_chat_template(messages("the dog"), add_generation_prompt=True, tokenize=False)
    done = client.completions.create(model=server.model, prompt=prompt, max_tokens=40)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("sat on the log", "stop")
    response = client.responses.create(model=server.model, input="the dog", max_output_tokens=40, stream=False)
    assert response.output_text == "sat on the log"
    events = list(client.responses.create(model=server.model, input="the dog", max_output_tokens=40, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "sat on the log"


def test_stop_strings(client, server):
    asked = {"model": server.model, "messages": messages("count"), "stop": ["three"]}
    if server.batching and server.checks:  # which the library's ignores
        with pytest.raises(openai.BadRequestError, match="stop: under continuous batching"):
            client.chat.completions.create(**asked)
    elif not server.batching:
        assert ask(client, server, asked["messages"], stop=["three"])[0] == "one two three"


# What the library's server answers with 4xx by itself.
KNOWN = {
    "broken JSON": b'{"model": ',
    "nothing": b"",
    "no object": b"[1, 2]",
    "unknown field": {"colour": "red"},
    "unknown model": {"model": "nobody/nothing"},
}
BAD = KNOWN | {
    "model of another type": {"model": 5},
    "no messages": {"messages": None},
    "empty messages": {"messages": []},
    "messages of another type": {"messages": "hello"},
    "a message of another type": {"messages": ["hello"]},
    "no role": {"messages": [{"content": "hello"}]},
    "unknown role": {"messages": [{"role": "nobody", "content": "hello"}]},
    "no content": {"messages": [{"role": "user"}]},
    "content of another type": {"messages": [{"role": "user", "content": 3}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "max_tokens of another type": {"max_tokens": "many"},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens absurd": {"max_tokens": 10**12},
    "temperature of another type": {"temperature": "hot"},
    "temperature below 0": {"temperature": -1},
    "temperature NaN": b'{"messages": [{"role": "user", "content": "one"}], "temperature": NaN}',
    "top_p above 1": {"top_p": 7},
    "seed of another type": {"seed": "x"},
    "stop of another type": {"stop": 5},
    "stream of another type": {"stream": "perhaps"},
    "bias of no token": {"logit_bias": {"99999": 1}},
    "two answers": {"n": 2},
    "logprobs": {"logprobs": True},
    "tools of another type": {"tools": "x"},
    "options of another type": {"chat_template_kwargs": "x"},
    "generation config": {"generation_config": "{"},
    "generation config absurd": {"generation_config": json.dumps({"max_new_tokens": -3})},
    "a prompt longer than the model": {"messages": messages("one two three " * 200)},
}
ELSEWHERE = {
    "/v1/completions": [{"prompt": ""}, {"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}],
    "/v1/responses": [{"input": []}, {"input": 5}, {"input": "one", "max_output_tokens": 0}, {}],
    "/load_model": [{}, {"model": "nobody/nothing"}],
    "/v1/nothing": [{}],
}


def test_bad_requests_are_refused_and_the_server_goes_on(client, server):
    root, good = server.url, {"model": server.model, "messages": messages("the dog")}
    for name, change in (BAD if server.checks else KNOWN).items():
        body = change if isinstance(change, bytes) else good | change
        status, answer = post(f"{root}/v1/chat/completions", body)
        assert 400 <= status < 500, (name, status, answer)
    for path, bodies in ELSEWHERE.items() if server.checks else ():
        for body in bodies:
            status, answer = post(root + path, body)
            assert 400 <= status < 500, (path, body, status, answer)
    assert ask(client, server, messages("the dog")) == ("sat on the log", "stop")


def test_a_refusal_names_the_field(servers):
    server = servers["anyformer"]
    body = {"messages": [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text"}]}]}
    status, answer = post(f"{server.url}/v1/chat/completions", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "messages.1.content.0.text")
    assert error["message"] == "messages.1.content.0.text: Field required"


def chat_in_a_terminal(server, home, lines):
    """What `transformers chat` shows, and its exit status; the terminal is a real one."""
    master, slave = pty.openpty()
    command = [*TRANSFORMERS, "chat", server.model, f"{server.url}/v1", "do_sample=False", "max_new_tokens=40"]
    # Offline, the library's client reaches no server at all, on this machine neither.
    variables = environment(home, TRANSFORMERS) | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    variables |= {"TERM": "dumb", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=variables, cwd=home)
    os.close(slave)
    os.write(master, "".join(f"{line}\n" for line in lines).encode())
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    return shown.decode(errors="replace"), process.wait(60)


@pytest.mark.parametrize("name", ["transformers, batching", "anyformer"])
def test_the_librarys_chat_in_a_terminal(servers, name, tmp_path):
    shown, status = chat_in_a_terminal(servers[name], tmp_path, ["one", "the cat", "!exit"])
    assert status == 0, shown
    first, second = shown.find("two three four five"), shown.find("sat on the mat")
    assert 0 <= first < second, shown


def test_what_cannot_be_served_is_said(tiny, tmp_path, learned, servers):
    taken = servers["anyformer"].url.rpartition(":")[2]
    tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1).save_pretrained(tmp_path / "both")
    tiny(layer_types=["global_sliding_attention"], sliding_window=4, num_global_tokens=1).save_pretrained(
        tmp_path / "global"
    )
    for folder in ("both", "global"):
        learned.tokenizer.save_pretrained(tmp_path / folder)
    for arguments, reason in (
        ([str(tmp_path / "absent"), "--port", "0"], "absent: no such folder or file"),
        ([str(learned.folder), "--port", taken], f"cannot listen at 127.0.0.1, port {taken}"),
        ([str(tmp_path / "both"), "--port", "0"], "is an encoder-decoder"),
        ([str(tmp_path / "global"), "--port", "0", "--continuous-batching"], "leaves a window"),
    ):
        done = CliRunner().invoke(app, ["serve", *arguments])
        assert (done.exit_code, reason in done.output) == (2, True), done.output


def test_every_kind_of_server_runs(servers):
    assert set(servers) == set(SERVERS)
    assert all(server.process.poll() is None for server in servers.values())
