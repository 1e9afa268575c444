"""Texts of control tokens in published models, recognised whatever type a file gives them.

A converter or a fine-tune may mark such a token as ordinary text, or omit it from the tokens that
end an answer. The lists are llama.cpp's (src/llama-vocab.cpp, `llama_vocab::impl::load`: the texts
of EOT, EOM and FIM_*, and `special_eog_ids`), with the same two exceptions.
"""

from collections.abc import Collection

TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",  # ChatML, Qwen, GPT-2
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",  # Llama 3, Granite
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",  # Phi, gpt-oss, Solar
        "<end_of_turn>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",  # Gemma
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",  # Mistral, Kimi
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",  # DeepSeek, SmolVLM
    }
)
FILL_IN = {  # tokens of fill-in-the-middle code models: name → texts
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # another file follows, so llama.cpp ends here
CONTROL_TEXTS = TURN_ENDS.union(*FILL_IN.values())


def turn_ends(texts: Collection[str]) -> frozenset[str]:
    """The texts among a vocabulary's added tokens that end a turn.

    In vocabularies with `<|return|>` and `<|call|>` (gpt-oss), or `<|calls|>` and `<|flush|>`
    (Solar), `<|end|>` only ends one of several messages of a turn. In Gemma 4, which has
    `<|tool_response>`, `</s>` is an ordinary word.
    """
    found = {text for text in TURN_ENDS if text in texts}
    if {"<|call|>", "<|return|>"} <= found or {"<|calls|>", "<|flush|>"} <= found:
        found.discard("<|end|>")
    if "<|tool_response>" in found:
        found.discard("</s>")
    return frozenset(found)
