"""What `nanokv train` shows and keeps: the log of a run, and its report."""
