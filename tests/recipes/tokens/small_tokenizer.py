"""Small real tokenizers, trained on three sentences."""

ADDED = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "Is the fox quick? The fox is quick.", "And the dog?"]


def build(template=None, *, adds_bos=False, trim_offsets=False, style="byte", tokens=(), **special):
    """Byte-level BPE like GPT-2's ("byte"), BPE with spaces as underscores like Llama's ("metaspace"), or Unigram like
    T5's ("unigram"); `tokens` are added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram() if style == "unigram" else models.BPE(unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style == "byte":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    names = ["<s>", "</s>", "<pad>"]
    options = {"initial_alphabet": alphabet, "special_tokens": names, "show_progress": False}
    if style == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=140, unk_token="<unk>", **options | {"special_tokens": [*names, "<unk>"]}
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=420, **options)
    backend.train_from_iterator(SENTENCES * 20, trainer)
    parts = [processors.ByteLevel(trim_offsets=trim_offsets)] if style == "byte" else []
    if adds_bos:
        parts.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    backend.post_processor = processors.Sequence(parts)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (*ADDED, *tokens)], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
