"""A short name for "these weights": two checkpoints of one config give different keys and values.

sha256 over the config and, of every parameter, its name, shape, dtype and first and last 16 values: a few kilobytes
are read, whatever the size of the model. It tells honest mix-ups apart; it is no defence against forgery.
"""

import hashlib
import json

import torch


def fingerprint(model) -> str:
    """16 hex digits."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        sample = torch.cat((flat[:16], flat[-16:])).float().cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
