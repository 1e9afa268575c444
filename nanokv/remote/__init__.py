"""Sends cached keys and values between processes: the link, the hand-over, the prefill process."""
