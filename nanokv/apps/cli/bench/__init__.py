"""What nanokv bench and nanokv profile need besides: peers, and the phases of a start."""
