"""What clients send and get: fields, messages, tools, grammars, answers. No threads here."""
