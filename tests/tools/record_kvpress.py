"""Record what kvpress 0.5.5 keeps of a prompt, and the logits of the next token: tests/facts/kvpress.json.

kvpress needs transformers < 5.3, so it runs in an environment of its own:
    python tests/tools/record_kvpress.py > tests/facts/kvpress.json
"""

import json
from importlib.metadata import version

import torch
from kvpress import KnormPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TOKENS = 40
PRESSES = {  # the options of the evicting cache → a press that keeps 20 of 40
    "policy=window:sinks=3:budget=20": StreamingLLMPress(0.5, n_sink=3),
    "policy=norms:recent=0:budget=20": KnormPress(0.5),
    "policy=snapkv:recent=6:budget=20": SnapKVPress(0.5, window_size=6, kernel_size=5),
}


def weights(shapes: dict) -> dict:
    """Name → tensor of that shape, drawn in the order of the names."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shapes[name], generator=generator) * (1 if "norm" in name else 0.3)
        for name in sorted(shapes)
    }


@torch.inference_mode()
def record(model, press, ids) -> dict:
    full = DynamicCache(config=model.config)
    model(ids[:, :TOKENS], past_key_values=full)
    cache = DynamicCache(config=model.config)
    with press(model):
        model.model(ids[:, :TOKENS], past_key_values=cache)
    kept = []
    for all_of, some in zip(full.layers, cache.layers, strict=True):
        near = torch.cdist(some.keys[0].double(), all_of.keys[0].double())  # (Hk,n,S)
        kept.append(near.argmin(-1).sort(-1).values.tolist())
    position = torch.tensor([[TOKENS]])
    logits = model(ids[:, TOKENS:], past_key_values=cache, position_ids=position).logits[0, -1]
    return {"kept": kept, "logits": [round(x, 6) for x in logits.tolist()]}


def main():
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager")).eval()
    model.load_state_dict(weights({name: x.shape for name, x in model.state_dict().items()}))
    ids = torch.arange(TOKENS + 1)[None] * 31 % CONFIG["vocab_size"]
    found = {options: record(model, press, ids) for options, press in PRESSES.items()}
    by = {name: version(name) for name in ("kvpress", "transformers")}
    print(json.dumps({"by": by, "config": CONFIG, "ids": ids[0].tolist(), "found": found}))


if __name__ == "__main__":
    main()
