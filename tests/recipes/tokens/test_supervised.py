import re
from pathlib import Path

import pytest
from small_tokenizer import build

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens.supervised import stop_ids, tokenize_rows
from anyformer.recipes.tokens.views import MARKS, marked_text

USER = {"role": "user", "content": "Is the fox quick?"}
ANSWER = {"role": "assistant", "content": "The fox is quick."}
MORE = {"role": "user", "content": "And lazy?"}
SECOND = {"role": "assistant", "content": "No, the dog is lazy."}
SYSTEM = {"role": "system", "content": "Be brief."}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


def tokenize(rows, tokenizer, **options):
    return tokenize_rows(rows, tokenizer, **({"max_length": None} | options))


def supervised(data, row=0):
    """The labels that are not -100, each checked to be the token it stands on."""
    item = data.dataset[row]
    assert len(item["input_ids"]) == len(item["labels"])
    assert all(label in (-100, token) for token, label in zip(item["input_ids"], item["labels"], strict=True))
    return [label for label in item["labels"] if label != -100]


def previews(data, tokenizer, marks=MARKS):
    return [marked_text(row["input_ids"], row["labels"], tokenizer, marks=marks) for row in data.dataset]


def marked(data, tokenizer, row=0):
    return re.findall("⟦(.*?)⟧", previews(data, tokenizer)[row], re.DOTALL)


# Conversations


def test_smollm2_single_turn(smollm2):
    row = {"prompt": [USER], "completion": [ANSWER]}
    data = tokenize([row], smollm2)
    ids, labels = data.dataset[0]["input_ids"], data.dataset[0]["labels"]
    assert ids == smollm2.apply_chat_template([USER, ANSWER])["input_ids"]
    prompt = smollm2.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    answer = smollm2("The fox is quick.")["input_ids"] + [smollm2.convert_tokens_to_ids("<|im_end|>")]
    assert ids[: len(prompt)] == prompt
    assert labels == [-100] * len(prompt) + answer + [-100]  # the line break after the turn is not trained on
    assert previews(data, smollm2) == [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nIs the fox quick?<|im_end|>\n<|im_start|>assistant\n"
        "⟦The fox is quick.<|im_end|>⟧\n"
    ]
    report = data.report
    assert (report.tokens, report.supervised_tokens, report.stopped) == (len(ids), len(answer), 1)
    assert report.supervised_share == len(answer) / len(ids)
    assert tokenize([{"messages": [USER, ANSWER]}], smollm2).dataset[0] == data.dataset[0]


def test_smollm2_every_assistant_turn(smollm2):
    messages = [SYSTEM, USER, ANSWER, MORE, SECOND]
    data = tokenize([{"messages": messages}], smollm2)
    assert data.dataset[0]["input_ids"] == smollm2.apply_chat_template(messages)["input_ids"]
    assert marked(data, smollm2) == ["The fox is quick.<|im_end|>", "No, the dog is lazy.<|im_end|>"]
    # Of prompt and completion the prompt's assistant turn is prompt.
    data = tokenize([{"prompt": messages[:-1], "completion": [SECOND]}], smollm2)
    assert marked(data, smollm2) == ["No, the dog is lazy.<|im_end|>"]
    assert data.dataset[0]["input_ids"] == smollm2.apply_chat_template(messages)["input_ids"]


@pytest.mark.parametrize(
    "answer",
    [
        "  spaces around \n",
        "ends in a line break\n",
        "\n\nstarts with two",
        "漢字と🦊 emoji🦊",
        "é",
        "<|im_end|> quoted inside <|im_start|>assistant\n",
        "assistant\n",
        "Is the fox quick?",
        "anyformerPLACEHOLDERanswer1x",
    ],
)
def test_answers_that_mislead_a_search(smollm2, answer):
    rows = [{"messages": [USER, {"role": "assistant", "content": answer}]}]
    data = tokenize(rows, smollm2)
    text = smollm2.decode(supervised(data))
    # A line break at the start melts into the generation prompt's own; that token is prompt, and counted.
    lost = (answer + "<|im_end|>").removesuffix(text)
    assert text.endswith("<|im_end|>") and lost.strip() == "" and lost in ("", answer[: len(lost)])
    assert data.report.merged == bool(lost) == answer[0].isspace()


@pytest.mark.parametrize(
    ("template", "style", "expected"),
    [
        (CHATML, "byte", ["The fox is quick.<|im_end|>", "No, the dog is lazy.<|im_end|>"]),
        (ZEPHYR, "byte", ["The fox is quick.</s>", "No, the dog is lazy.</s>"]),
        (LLAMA3, "byte", ["The fox is quick.<|eot|>", "No, the dog is lazy.<|eot|>"]),
        # No generation prompt: the model itself writes the space after [/INST].
        (LLAMA2, "byte", [" The fox is quick. </s>", " No, the dog is lazy. </s>"]),
        (LLAMA2, "metaspace", [" The fox is quick. </s>", " No, the dog is lazy. </s>"]),
    ],
    ids=["chatml", "zephyr", "llama3", "llama2", "llama2-metaspace"],
)
@pytest.mark.parametrize("pad", ["", "  \n"], ids=["plain", "padded content"])
def test_templates(template, style, expected, pad):
    if pad and "strip" not in template and "trim" not in template:
        expected = [
            f"{pad}{text[: -len(end)]}{pad}{end}" for text in expected for end in [re.search(r"<\S+$", text)[0]]
        ]
    tokenizer = build(template, style=style, adds_bos=True)
    padded = [{**message, "content": f"{pad}{message['content']}{pad}"} for message in (USER, ANSWER, MORE, SECOND)]
    data = tokenize([{"messages": padded}], tokenizer)
    assert data.dataset[0]["input_ids"] == tokenizer.apply_chat_template(padded)["input_ids"]
    assert marked(data, tokenizer) == expected
    assert data.report.stopped == 1


def test_one_bos(smollm2):
    tokenizer = build(LLAMA3, adds_bos=True)
    bos = tokenizer.bos_token_id
    rows = [{"messages": [USER, ANSWER]}]
    assert tokenize(rows, tokenizer).dataset[0]["input_ids"].count(bos) == 1
    rows = [{"prompt": "The fox", "completion": " is quick."}, {"prompt": "<s>The fox", "completion": " is quick."}]
    data = tokenize(rows, tokenizer)
    assert data.dataset[0] == data.dataset[1]
    assert data.dataset[0]["input_ids"][0] == bos and data.dataset[0]["input_ids"].count(bos) == 1
    assert data.dataset[0]["labels"][0] == -100
    # None where neither tokenizer nor template writes one.
    assert bos not in tokenize(rows[:1], build()).dataset[0]["input_ids"]


def test_answer_rewritten_by_the_template():
    # Qwen3's habit: reasoning is taken apart and laid out anew, and left out of earlier turns.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>\n"
        "{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}\n</think>\n\n{% endif %}"
        "{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = build(template)
    thinking = {"role": "assistant", "content": "<think>quick?</think>The fox is quick."}
    spaced = {**ANSWER, "content": f" {ANSWER['content']}\n"}
    data = tokenize([{"messages": [USER, thinking]}, {"messages": [USER, spaced, MORE, SECOND]}], tokenizer)
    assert marked(data, tokenizer, 0) == ["<think>\nquick?\n</think>\n\nThe fox is quick.<|im_end|>"]
    assert marked(data, tokenizer, 1) == [
        "The fox is quick.<|im_end|>",
        "<think>\n\n</think>\n\nNo, the dog is lazy.<|im_end|>",
    ]
    # The reasoning of an earlier turn is gone, and what is left of the turn is learned.
    data = tokenize([{"messages": [USER, thinking, MORE, SECOND]}], tokenizer)
    assert marked(data, tokenizer) == [
        "The fox is quick.<|im_end|>",
        "<think>\n\n</think>\n\nNo, the dog is lazy.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("<|im_end|>", ""), "writes no end-of-turn token"),
        (CHATML.replace("<|im_end|>", "<|not_a_token|>"), "writes no end-of-turn token"),
        (CHATML.replace("<|im_end|>", "{{ '<|eot|>' if loop.last else '' }}"), "Row 1: cannot tell for certain"),
        (CHATML.replace("m.content", "m.content | upper"), "does not write an assistant message's text exactly once"),
        (CHATML.replace("{{ m.content", "{{ m.content }} {{ m.content"), "exactly once"),
        (CHATML.replace("m.content", "m.content | replace('fox', 'cat')"), "Row 1: cannot tell for certain"),
        ("{{ raise_exception('tools needed') }}", "fails on a plain exchange: tools needed"),
        (None, "the tokenizer has no chat template"),
    ],
)
def test_templates_that_are_refused(template, message):
    with pytest.raises(UserError, match=message):
        tokenize([{"messages": [USER, ANSWER, MORE, SECOND]}], build(template))


def test_template_that_refuses_a_row():
    rows = [{"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}]
    with pytest.raises(UserError, match=r"Row 2: the chat template refuses the conversation: Only user and assistant"):
        tokenize(rows, build(LLAMA2))


def test_generation_prompt_unlike_the_training_text_is_told():
    template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    data = tokenize([{"messages": [USER, ANSWER]}], build(template))
    assert "prompted otherwise than it was trained" in data.report.warnings[0]
    template = CHATML[: CHATML.index("{% if add")]
    data = tokenize([{"messages": [USER, ANSWER]}], build(template))
    assert "ignores add_generation_prompt" in data.report.warnings[0]
    assert marked(data, build(template)) == ["The fox is quick.<|im_end|>"]
    assert tokenize([{"messages": [USER, ANSWER]}], build(CHATML)).report.warnings == []


def published_templates():
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    return {path.stem: path.read_text() for path in folder.glob("*.jinja")}


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3", "phi3", "gemma", "gemma3", "cohere", "lfm2", "qwen3_instruct_2507"]
)
def test_agrees_with_generation_markers(name):
    """Oracle: templates as published by model makers, into which TRL has set {% generation %} markers."""
    template = published_templates().get(f"{name}_training")
    if template is None:
        pytest.skip(f"this trl ships no {name}_training template")
    tokenizer = build(template)
    tokenizer.add_tokens(sorted(set(re.findall(r"<\|\w+\|>|<\w+_of_\w+>", template))), special_tokens=True)
    messages = [USER, ANSWER, MORE, SECOND]
    oracle = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    data = tokenize([{"messages": messages}], tokenizer)
    ids, labels = data.dataset[0]["input_ids"], data.dataset[0]["labels"]
    assert ids == oracle["input_ids"]
    ours = [label != -100 for label in labels]
    # Some markers take in the line breaks around a turn, or the eos that Phi writes after the last turn.
    different = [i for i, (a, b) in enumerate(zip(ours, oracle["assistant_masks"], strict=True)) if a != bool(b)]
    assert all(not ours[i] and tokenizer.decode([ids[i]]) in ("\n", "</s>") for i in different)
    assert len(different) <= 4 and sum(ours) > 10


# Plain text


def test_plain_prompt_and_completion():
    tokenizer = build()
    data = tokenize([{"prompt": "Is the fox", "completion": " quick?"}], tokenizer)
    prompt, completion = tokenizer("Is the fox")["input_ids"], tokenizer(" quick?")["input_ids"]
    assert data.dataset[0] == {
        "input_ids": [*prompt, *completion, tokenizer.eos_token_id],
        "labels": [-100] * len(prompt) + [*completion, tokenizer.eos_token_id],
    }
    # An end token that the file already has is not written twice.
    again = tokenize([{"prompt": "Is the fox", "completion": " quick?</s>"}], tokenizer)
    assert again.dataset[0] == data.dataset[0]
    assert previews(data, tokenizer, marks=("[", "]")) == ["Is the fox[ quick?</s>]"]


@pytest.mark.parametrize("trim", [False, True], ids=["exact offsets", "trimmed offsets"])
def test_token_across_the_boundary_is_prompt(trim):
    tokenizer = build(trim_offsets=trim)
    data = tokenize([{"prompt": "Is the ", "completion": "quick fox"}], tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(data.dataset[0]["input_ids"])
    assert tokens == ["Is", "Ġthe", "Ġquick", "Ġfox", "</s>"]
    assert tokenizer.convert_ids_to_tokens(supervised(data)) == ["Ġfox", "</s>"]
    assert data.report.merged == 1
    # With the space on the other side nothing straddles.
    data = tokenize([{"prompt": "Is the", "completion": " quick fox"}], tokenizer)
    assert tokenizer.convert_ids_to_tokens(supervised(data)) == ["Ġquick", "Ġfox", "</s>"]
    assert data.report.merged == 0


def test_trimmed_offsets_in_a_conversation():
    tokenizer = build(LLAMA2, trim_offsets=True)
    data = tokenize([{"messages": [USER, ANSWER]}], tokenizer)
    assert marked(data, tokenizer) == [" The fox is quick. </s>"]


def test_characters_of_several_tokens():
    tokenizer = build()
    data = tokenize([{"prompt": "漢🦊", "completion": "🦊é"}], tokenizer)
    assert tokenizer.decode(supervised(data)) == "🦊é</s>"
    assert len(supervised(data)) == 7  # four bytes, two bytes, the end


def test_text_is_supervised_whole():
    tokenizer = build(adds_bos=True)
    data = tokenize([{"text": "The fox"}], tokenizer)
    ids = [tokenizer.bos_token_id, *tokenizer("The fox", add_special_tokens=False)["input_ids"], 1]
    assert tokenizer.eos_token_id == 1
    assert data.dataset[0] == {"input_ids": ids, "labels": [-100, *ids[1:]]}
    # Nothing predicts a row's first token.
    assert (data.report.tokens, data.report.supervised_tokens) == (len(ids), len(ids) - 1)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "Is", "completion": " the"},
    ],
)
def test_loss_on_all(row):
    tokenizer = build(CHATML)
    data = tokenize([row], tokenizer, loss_on="all")
    assert data.dataset[0]["labels"] == [-100, *data.dataset[0]["input_ids"][1:]]
    assert data.dataset[0]["input_ids"] == tokenize([row], tokenizer).dataset[0]["input_ids"]
    assert data.report.stopped == 1


# Length, counts, refusals


def test_drop_and_cut():
    tokenizer = build()
    rows = [
        {"prompt": "Is the fox", "completion": " quick?"},
        {"prompt": "Is the", "completion": " fox" * 20},
        {"prompt": "fox " * 20, "completion": "quick"},
    ]
    data = tokenize(rows, tokenizer, max_length=10)
    report = data.report
    assert (report.rows, report.rows_kept, report.truncated) == (3, 1, 0)
    assert report.dropped == {"longer than max_length": 2}
    data = tokenize(rows, tokenizer, max_length=10, truncation="keep_start")
    report = data.report
    assert (report.rows, report.rows_kept, report.truncated) == (3, 2, 1)
    assert report.dropped == {"nothing supervised within max_length": 1}
    assert report.stopped == 1  # the cut row has lost its end
    assert [len(ids) for ids in data.dataset["input_ids"]] == [6, 10]
    assert report.tokens == 16
    assert report.supervised_tokens == 3 + 8
    assert report.longest == max(len(ids) for ids in tokenize(rows, tokenizer).dataset["input_ids"])


def test_a_row_of_exactly_max_length_is_kept():
    tokenizer = build()
    row = {"prompt": "Is the fox", "completion": " quick?"}
    length = len(tokenize([row], tokenizer).dataset[0]["input_ids"])
    assert tokenize([row], tokenizer, max_length=length).report.dropped == {}
    with pytest.raises(UserError):
        tokenize([row], tokenizer, max_length=length - 1)


def test_nothing_left_names_count_cause_and_setting():
    rows = [{"prompt": "fox " * 20, "completion": "quick"}] * 3
    with pytest.raises(UserError, match=r"None of the 3 rows .* 3 longer than max_length\. train\.max_length is 8"):
        tokenize(rows, build(), max_length=8)
    with pytest.raises(UserError, match=r"3 nothing supervised within max_length.*max_length is 8.*keep_start"):
        tokenize(rows, build(), max_length=8, truncation="keep_start")
    with pytest.raises(UserError, match="No rows to tokenise"):
        tokenize([], build())
    with pytest.raises(UserError, match=r"1 nothing supervised\."):
        tokenize([{"messages": [USER]}], build(CHATML))


def test_tokenizers_that_cannot_serve():
    from transformers import ByT5Tokenizer

    with pytest.raises(UserError, match="ByT5Tokenizer is not a fast tokenizer"):
        tokenize([{"text": "The fox"}], ByT5Tokenizer())
    with pytest.raises(UserError, match="has no eos_token"):
        tokenize([{"text": "The fox"}], build(eos_token=None))


def test_truncation_left_over_in_the_tokenizer_does_not_matter():
    tokenizer = build(CHATML, trim_offsets=True)
    tokenizer("The fox", truncation=True, max_length=2, padding="max_length")  # stays set in the backend
    data = tokenize([{"text": "The quick brown fox jumps."}], tokenizer)
    assert tokenizer.decode(data.dataset[0]["input_ids"]) == "The quick brown fox jumps.</s>"
    assert '"trim_offsets":true' in tokenizer.backend_tokenizer.to_str()  # only the copy was changed


def test_batches_keep_the_order():
    tokenizer = build()
    rows = [{"text": f"The fox {i}"} for i in range(1100)]
    data = tokenize(iter(rows), tokenizer)
    assert [tokenizer.decode(ids) for ids in data.dataset["input_ids"]] == [f"{row['text']}</s>" for row in rows]


def test_stop_ids(smollm2):
    assert stop_ids(smollm2) == [smollm2.eos_token_id] == smollm2.convert_tokens_to_ids(["<|im_end|>"])
    tokenizer = build(CHATML)
    assert tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)) == ["</s>", "<|im_end|>"]
    assert stop_ids(build(ZEPHYR)) == stop_ids(build()) == [tokenizer.eos_token_id]
    assert build().convert_ids_to_tokens(stop_ids(build(LLAMA3, eos_token=None))) == ["<|eot|>"]
    # A template that the plain exchange cannot probe does not keep a plain-text model from being saved.
    assert stop_ids(build("{{ raise_exception('no') }}")) == [tokenizer.eos_token_id]
    with pytest.raises(UserError, match="could not stop"):
        stop_ids(build(eos_token=None))


# What the trainer makes of it


def test_collator_keeps_the_real_eos_where_pad_is_eos(smollm2):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    assert smollm2.pad_token_id == smollm2.eos_token_id
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, MORE, SECOND]}]
    data = tokenize(rows, smollm2)
    batch = DataCollatorForLanguageModeling(pad_token_id=smollm2.pad_token_id)(list(data.dataset))
    length = batch["labels"].shape[1]
    for item, labels in zip(data.dataset, batch["labels"].tolist(), strict=True):
        assert labels == item["labels"] + [-100] * (length - len(item["labels"]))
    assert [labels.count(smollm2.eos_token_id) for labels in batch["labels"].tolist()] == [1, 2]


@pytest.mark.parametrize("packing", [False, True])
def test_trainer_takes_the_labels_as_they_are(tmp_path, packing):
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = build(CHATML)
    rows = [{"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}, {"messages": [MORE, SECOND]}]
    data = tokenize(rows, tokenizer, max_length=64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    settings = SFTConfig(
        str(tmp_path), max_length=64, packing=packing, per_device_train_batch_size=3, report_to=[], use_cpu=True
    )
    trainer = SFTTrainer(LlamaForCausalLM(config), settings, train_dataset=data.dataset, processing_class=tokenizer)
    trained = []
    for batch in trainer.get_train_dataloader():
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
            trained += [label for label in labels if label != -100]
    assert sorted(trained) == sorted(label for row in range(3) for label in supervised(data, row))


CHOSEN = {
    "completion": ("completion", ["No, the dog is lazy.<|im_end|>"]),
    "assistant": ("assistant", ["The fox is quick.<|im_end|>", "No, the dog is lazy.<|im_end|>"]),
    "users": (["user"], ["Is the fox quick?<|im_end|>", "And lazy?<|im_end|>"]),
    "both": (
        ["user", "assistant"],
        [
            "Is the fox quick?<|im_end|>",
            "The fox is quick.<|im_end|>",
            "And lazy?<|im_end|>",
            "No, the dog is lazy.<|im_end|>",
        ],
    ),
}


@pytest.mark.parametrize(("loss_on", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_the_loss_falls_on_chosen_roles(loss_on, expected):
    tokenizer = build(CHATML)
    row = {"prompt": [SYSTEM, USER, ANSWER, MORE], "completion": [SECOND]}
    assert marked(tokenize([row], tokenizer, loss_on=loss_on), tokenizer) == expected


def test_a_turn_can_be_switched_off():
    tokenizer = build(CHATML)
    off = {"messages": [USER, ANSWER | {"train": False}, MORE, SECOND | {"train": True}]}
    assert marked(tokenize([off], tokenizer), tokenizer) == ["No, the dog is lazy.<|im_end|>"]
    everything = marked(tokenize([off], tokenizer, loss_on="all"), tokenizer)
    assert len(everything) == 2 and "The fox" not in "".join(everything)
    assert everything[1].startswith("\n<|im_start|>user\nAnd lazy?")
    silent = {"messages": [USER, ANSWER | {"train": False}]}
    data = tokenize([off, silent], tokenizer)
    assert data.report.dropped == {"nothing supervised": 1}


def test_roles_of_plain_text_are_refused():
    with pytest.raises(UserError, match="Row 1 is plain text, which has no roles"):
        tokenize([{"prompt": "a", "completion": "b"}], build(), loss_on=["user"])
