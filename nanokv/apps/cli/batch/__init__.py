"""The lines that nanokv batch reads, and the lines that it writes."""
