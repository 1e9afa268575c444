"""Text ↔ token ids: tokenizer, chat templates and the process that renders them, streaming."""
