"""Text in, ids out, and back: tokenizer, chat template and its sandbox, streaming, thinking."""
