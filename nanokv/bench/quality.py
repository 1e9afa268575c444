"""What another format of weights costs in quality, beside the bytes that it saves."""

from nanokv.bench.runners import Ours
from nanokv.inference import score
from nanokv.study.quality import log_likelihood


def changes(plain, models: dict, ids) -> list[dict]:
    """One row per model of `models`, name → model: bytes of weights that a decode step reads, and by how much the
    log-likelihood of each token of the text ids (B,T) differs from the plain model's, in nats: |mean| and mean."""
    truth, rows = log_likelihood(score(plain, ids), ids), []  # (B,T−1)
    for name, model in models.items():
        change = log_likelihood(score(model, ids), ids) - truth
        read = Ours(model, name, "dict", {}, 1, plain.embed_tokens.weight.dtype).weight_bytes
        mean, bias = float(change.abs().mean()), float(change.mean())
        rows.append({"weights": name, "bytes": read, "mean_change": mean, "bias": bias})
    return rows
