"""Parts of `nanokv bench` and `nanokv profile`: peer processes, and the phases of a start."""
