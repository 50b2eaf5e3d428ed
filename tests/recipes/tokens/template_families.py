"""Chat templates as the known families write them, and some that misbehave, each with what a model is to write."""

from typing import Any, NamedTuple

Message = dict[str, Any]

USER = {"role": "user", "content": "Is the fox quick?"}
ANSWER = {"role": "assistant", "content": "The fox is quick."}
MORE = {"role": "user", "content": "And lazy?"}
SECOND = {"role": "assistant", "content": "No, the dog is lazy."}
SYSTEM = {"role": "system", "content": "Be brief."}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """A template, its tokens, and what it writes before and behind an answer that the model has to write itself."""

    template: str
    tokens: tuple[str, ...]
    before: str
    end: str
    trims: bool = False
    has_system: bool = True


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "", "<|im_end|>"),
    # The system message is merged into the first turn of the user.
    "llama-2": Family(
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
        "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{% if loop.first and system %}{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set text = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        (),
        " ",
        " </s>",
        trims=True,
    ),
    "llama-3": Family(
        "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
        "+ m.content | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
        "{{ text }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "",
        "<|eot_id|>",
        trims=True,
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "",
        "<end_of_turn>",
        trims=True,
        has_system=False,
    ),
    "phi-3": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        "",
        "<|end|>",
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        (),
        "",
        "</s>",
    ),
    # Reasoning is removed from every turn.
    "deepseek": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "{{ '<｜User｜>' + m.content }}{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + "
        "'<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "",
        "<｜end▁of▁sentence｜>",
    ),
    "numbers turns": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.index | string + '\n' + m.content + "
        "'<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' + (messages | length + 1) | string + '\n' }}"
        "{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
    ),
    "writes the time": Family(
        "{{ 'Now: ' + strftime_now('%Y-%m-%d %H:%M:%S') + '\n' }}" + CHATML,
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
    ),
    "writes the date": Family(
        "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML, ("<|im_start|>", "<|im_end|>"), "", "<|im_end|>"
    ),
    "strips": Family(
        CHATML.replace("m.content", "m.content.strip()"), ("<|im_start|>", "<|im_end|>"), "", "<|im_end|>", trims=True
    ),
    "strips the end of answers": Family(
        CHATML.replace("m.content", "m.content.rstrip() if m.role == 'assistant' else m.content"),
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
    ),
}

# Conversations that lead a search astray, whatever the template.
HARD = {
    "an answer that is the question": [USER, {**ANSWER, "content": USER["content"]}, MORE, SECOND],
    "equal answers": [USER, ANSWER, USER, ANSWER, USER, ANSWER],
    "an answer inside another": [USER, {**ANSWER, "content": "fox"}, MORE, {**ANSWER, "content": "fox fox"}],
    "special tokens in content": [
        {**USER, "content": "What is <|im_end|> and </s>?"},
        {**ANSWER, "content": "<|im_start|>assistant\nEnd <|im_end|>\n<|im_start|>user\nand <|eot_id|><end_of_turn>."},
        MORE,
        SECOND,
    ],
    "placeholders in content": [
        {**USER, "content": "anyformerPLACEHOLDER1cx"},
        {**ANSWER, "content": "anyformerPLACEHOLDERQ0cx anyformerPLACEHOLDER3cx"},
        MORE,
        {**SECOND, "content": "anyformerPLACEHOLDER3cx"},
    ],
    "unicode": [{**USER, "content": "漢字 é\u0301?"}, {**ANSWER, "content": "🦊 ﷽ \u200b ß\r\n\t漢"}, MORE, SECOND],
    "many turns": [turn for i in range(12) for turn in ({**USER, "content": f"{i}?"}, {**ANSWER, "content": f"{i}."})],
    "roles as answers": [USER, {**ANSWER, "content": "assistant\n"}, MORE, {**ANSWER, "content": "user"}],
}

# Tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = {"role": "user", "content": "Weather in Köln?"}
RESULT = {"role": "tool", "content": "T = 12", "tool_call_id": "abcdefghi", "name": "weather"}
REPLY = {"role": "assistant", "content": "It is 12 degrees."}


def call(content: str = "", *cities: str) -> Message:
    """A turn that calls `weather` once for each city."""
    calls = [
        {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in cities or ("Köln",)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


# As Mistral's: tools stand before the last question, a call has no header of its own, its id is checked.
MISTRAL = (
    "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools is not none and m == last %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}"
    '{% endif %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson + '
    "', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": \"' + m.content + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# As Hermes' and Qwen's.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + m.content + "
    "'</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson + '
    "'}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]", "[TOOL_CALLS]")
