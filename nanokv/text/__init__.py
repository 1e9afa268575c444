"""Text in, ids out, and back: tokenizer, chat templates and the process that renders them, streaming, thinking."""
