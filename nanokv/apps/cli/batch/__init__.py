"""Input and output of `nanokv batch`: the lines that it reads and the lines that it writes."""
