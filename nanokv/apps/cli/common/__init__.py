"""Code that several commands share: flags, files, loading of models, the terminal and its text."""
