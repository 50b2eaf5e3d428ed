"""`push_to_hub` of the model itself writes the modeling files; the repository opens where nothing is installed."""

from .conftest import run_python

PUSH = """
import torch
from anyformer import AnyformerConfig, AnyformerForCausalLM

torch.manual_seed(0)
config = AnyformerConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
)
model = AnyformerForCausalLM(config).eval()
model.push_to_hub("alice/direct", private=True)
print(repr(model(torch.tensor([[3, 4, 5, 6]])).logits[0, -1, :4].tolist()))
"""

OPEN = """
import sys

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("alice/direct", trust_remote_code=True)
print(repr(model(torch.tensor([[3, 4, 5, 6]])).logits[0, -1, :4].tolist()))
AutoModel.from_pretrained("alice/direct", trust_remote_code=True)
model.generate(torch.tensor([[3, 4, 5, 6]]), max_new_tokens=3)
model.push_to_hub("alice/again", private=True)
"""


def test_a_pushed_model_opens_and_is_pushed_again_without_the_project(hub):
    pushed = run_python(PUSH, hub.env)
    assert pushed.returncode == 0, pushed.stderr[-2000:]
    assert "modeling_anyformer.py" in hub.server.files("alice/direct")
    opened = run_python(OPEN, hub.env)
    assert opened.returncode == 0, opened.stderr[-2000:]
    assert opened.stdout.strip().splitlines()[0] == pushed.stdout.strip().splitlines()[-1]
    again = run_python(OPEN.replace("alice/direct", "alice/again").replace("alice/again", "alice/again", 1), hub.env)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.strip().splitlines()[0] == pushed.stdout.strip().splitlines()[-1]
