"""Fuzz target: config.json and generation_config.json, read by the model and by the loader."""

import json

import common

from nanokv.config import Config, GenerationConfig
from nanokv.errors import ConfigError
from weights_loader import names, strict

INSTRUMENT = ["nanokv.config", "nanokv.config_file", "weights_loader"]
ALLOWED = (ConfigError, strict.CheckpointError)
mutate = common.json_mutator


def seeds() -> dict[str, bytes]:
    files = {
        name: (common.TINY / name).read_bytes()
        for name in ("config.json", "generation_config.json")
    }
    fields = json.loads(files["config.json"])
    yarn = {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        }
    }
    return files | {"yarn": json.dumps(fields | yarn).encode(), "empty": b"{}"}


def run(data: bytes) -> None:
    path = common.scratch() / "config.json"
    path.write_bytes(data)
    common.expect(ALLOWED, GenerationConfig.from_folder, path.parent)
    common.expect(ALLOWED, lambda: names.expected(strict.read_object(path)))
    config = Config.from_folder(path.parent)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
