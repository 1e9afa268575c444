"""The families whose embedding, blocks or norms are not those of model.py."""

from nanokv.cla import SharingBlock, shared_entries
from nanokv.hybrid import block_of, lfm2_block
from nanokv.layer_kinds import (
    GemmaBlock,
    OlmoBlock,
    OnePlusNorm,
    ScaledEmbedding,
    SinkBlock,
    SmolBlock,
    WideNorm,
)
from nanokv.model import Parts

PARTS = {
    "smollm3": Parts(block=SmolBlock),
    "olmo3": Parts(block=OlmoBlock, norm=WideNorm),
    "qwen3_cla": Parts(block=SharingBlock, entries=shared_entries),
    "gpt_oss": Parts(block=SinkBlock, norm=WideNorm),
    "gemma3_text": Parts(ScaledEmbedding, GemmaBlock, OnePlusNorm),
    "qwen3_5_text": Parts(block=block_of, norm=OnePlusNorm),
    "lfm2": Parts(block=lfm2_block),
}
