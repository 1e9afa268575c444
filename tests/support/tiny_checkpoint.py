"""A tiny random Qwen3 checkpoint, written by transformers into a folder: what the command-line tests load.

Its weights are random (it talks nonsense), but every file is a real one: config.json, generation_config.json,
a byte-level BPE tokenizer.json, tokenizer_config.json with a ChatML template, model.safetensors.
head_dim differs from hidden / heads, and norm weights are random, so that a mix-up cannot go unnoticed.
Ids: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2. The template knows `enable_thinking`, as Qwen3's does.
"""

import json
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LINES = (  # what the merges are learned from
    "My name is Zorbla. Nice to meet you, Zorbla. What is my name? Your name is Zorbla.",
    "system user assistant You are a helpful assistant. Once upon a time there was a cache of keys and values.",
    "The cache holds one key and one value per token, a layer and a KV head; prefill writes them, decode reads them.",
)


def write_tiny_checkpoint(folder, **config_overrides) -> Path:
    """Write a checkpoint into `folder` and return it; overrides are fields of transformers' Qwen3Config.

    `dtype=torch.float16` stores the weights in that type; `seed=1` gives other weights.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seed, dtype = config_overrides.pop("seed", 0), config_overrides.pop("dtype", torch.float32)
    vocabulary = write_tokenizer(folder)
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.12,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | config_overrides
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is skipped
                weight.data.uniform_(0.5, 1.5)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0, do_sample=False)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> int:
    """tokenizer.json and tokenizer_config.json; returns the vocabulary's size (3 special + 256 bytes + merges)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    return tokenizer.get_vocab_size()
