"""Decoding with multi-head latent attention, side by side in one process: Anyformer and the stock DeepSeek-V3 class.

    python benchmarks/mla_decode.py

One set of random weights, fp32. Each side reads the same prompt into its own cache; then the two take turns generating
the same tokens one by one, so that what else the machine does falls on both, and the median of the rounds is printed.
After a round the cache is cut back to the prompt. All layers but the last are dense, which has 8 experts.
"""

import argparse
import statistics
import time

import torch
from transformers import Cache, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache

from anyformer import from_hf

VOCABULARY, CHUNK = 4096, 1024


def stock_model(layers: int, heads: int) -> DeepseekV3ForCausalLM:
    """The stock class with random weights; all ranks and widths of a head but `q_lora_rank` are DeepSeek-V3's."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        # The import refuses a config whose experts no layer has.
        first_k_dense_replace=layers - 1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        n_group=1,
        topk_group=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=8192,
    )
    return DeepseekV3ForCausalLM(config).eval()


def prefill(model: torch.nn.Module, cache: Cache, prompt: torch.Tensor) -> torch.Tensor:
    """The token [batch, 1] after the prompt, read in chunks, because the scores of all of it fill gigabytes."""
    for chunk in prompt.split(CHUNK, dim=1):
        logits = model(chunk, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits.argmax(-1)


def decode(model: torch.nn.Module, cache: Cache, token: torch.Tensor, steps: int) -> tuple[float, torch.Tensor]:
    """Seconds of `steps` greedy steps and their tokens [batch, steps]; the cache is as long afterwards as before."""
    tokens = []
    started = time.perf_counter()
    for _ in range(steps):
        token = model(token, cache=cache, use_cache=True).logits.argmax(-1)
        tokens.append(token)
    seconds = time.perf_counter() - started
    cache.crop(-steps)
    return seconds, torch.cat(tokens, 1)


def cached(cache: Cache) -> tuple[int, int]:
    """Values and bytes that one layer keeps of one token, counted on the cache's own tensors."""
    layer = cache.layers[0]
    places = layer.keys.shape[0] * layer.keys.shape[2]  # batch x tokens
    values, size = (layer.keys.numel() + layer.values.numel()), (layer.keys.nbytes + layer.values.nbytes)
    return values // places, size // places


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    options = parser.parse_args()
    stock = stock_model(options.layers, options.heads)
    models = {"anyformer": from_hf(stock), "stock DeepseekV3": stock}
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, VOCABULARY, (options.batch, options.context), generator=generator)
    caches: dict[str, Cache] = {}
    first, kept = {}, {}
    for name, model in models.items():
        if options.cache == "static":
            caches[name] = StaticCache(config=model.config, max_cache_len=options.context + options.steps)
        else:
            caches[name] = DynamicCache(config=model.config)
        first[name] = prefill(model, caches[name], prompt)
        kept[name] = cached(caches[name])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    tokens = {}
    for _ in range(options.rounds + 1):
        for name, model in models.items():
            spent, tokens[name] = decode(model, caches[name], first[name], options.steps)
            seconds[name].append(spent)
    ours, theirs = tokens.values()
    assert torch.equal(ours, theirs), "the two sides generate different tokens"
    print(
        f"{torch.get_num_threads()} threads, batch {options.batch}, {options.context} tokens of context, "
        f"{options.layers} layers, {options.heads} heads, {options.cache} cache, {options.rounds} rounds of "
        f"{options.steps} tokens"
    )
    reference = statistics.median(seconds["stock DeepseekV3"][1:])
    for name, times in seconds.items():
        median = statistics.median(times[1:])  # the first round warms up
        values, size = kept[name]
        print(
            f"{name:16} {ours.numel() / median:7.2f} tokens/s  {reference / median:5.2f} x stock  "
            f"cache a token and layer: {values} values, {size} bytes"
        )
    print(f"the same {ours.numel()} greedy tokens on both sides")


if __name__ == "__main__":
    main()
