"""Steps of `generate` beside a static cache are one compiled graph, for all kinds of layers, with the same tokens."""

import pytest
import torch
from position_kinds import GREEDY, MLA, ids
from transformers import CompileConfig

BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
GLOBAL = {"layer_types": ["global_sliding_attention", "full_attention"], "sliding_window": 4, "num_global_tokens": 2}
KINDS = {
    "grouped": {},
    "latent": MLA,
    "sliding": {"sliding_window": 4},
    "globals": GLOBAL,
    "alibi": {"position_embedding": "alibi"},
    "relative": {"position_embedding": "relative"},
    "sinks and a cap": {"attention_sinks": True, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
    "two": BOTH,
    "two, latent": BOTH | MLA,
    "two, relative": BOTH | {"position_embedding": "relative"},
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step(tiny, kind, padded):
    torch.compiler.reset()
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*arguments):
            runs.append(1)
            return graph.forward(*arguments)

        return run

    model, tokens = tiny(**KINDS[kind]), ids(2, 7)
    mask = torch.ones_like(tokens)
    if padded and model.config.is_encoder_decoder:
        mask[0, 5:] = 0
    elif padded:
        mask[0, :3] = 0
    options = {"attention_mask": mask} | GREEDY
    expected = model.generate(tokens * mask, use_cache=False, **options)
    compiled = CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    got = model.generate(tokens * mask, cache_implementation="static", compile_config=compiled, **options)
    assert torch.equal(got, expected)
    # Each step behind the prompt is one run of a graph; the library's static windows count in Python, and are compiled
    # a second time once that has been seen.
    assert (len(graphs), len(runs)) == (2 if kind == "sliding" else 1, GREEDY["max_new_tokens"] - 1)
