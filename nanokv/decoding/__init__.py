"""From logits to tokens: sampling, the loop, beams, speculation, batches."""
