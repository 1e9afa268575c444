"""What several commands share: flags, files, the model's loading, the terminal and its text."""
