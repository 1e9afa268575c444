"""Convert GGUF metadata to config.json, tokenizer.json and tokenizer_config.json, and tensor names.

    folder = materialize(Path("model.gguf"))  # the small files; the weights stay in the GGUF file
    path, tensors = places(folder)            # Hugging Face's name → place of the values

An unknown key of the architecture raises, like an unknown field of config.json, because it may
change the maths, unless its value switches nothing on. Sources: llama.cpp's
gguf-py/gguf/constants.py (keys), convert_hf_to_gguf.py (permuted rows), llama-model.cpp (keys that
each architecture reads, and their defaults).
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from . import gguf_layers, gguf_stacks, gguf_states
from .families import FAMILIES
from .gguf_file import GgufFile, TensorInfo, read_gguf
from .gguf_forms import Form
from .names import to_hugging_face
from .neutral import is_off
from .pooling import POOLING, gguf_pooling
from .strict import CheckpointError, quote, read_object

POINTER = "gguf.json"  # in the folder: the path of the GGUF file
FAMILY_OF = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
    "olmo2": "olmo3",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "lfm2": "lfm2",
    "qwen35": "qwen3_5_text",
}
KEYS = {  # key after the architecture's name → field of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# These keys must agree with the others.
CHECKED = {"attention.value_length", "rope.dimension_count", "vocab_size"}
ROPE_SCALING = {
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
HARMLESS = {  # keys without effect on generation
    "rope.scaling.finetuned",
    "pooling_type",
    "tensor_data_layout",
    "decoder_start_token_id",
    "classifier.output_labels",
    "expert_weights_norm",
}
NEUTRAL = {  # keys with values besides those of `is_off` that have no effect
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.dimension_sections": ([0, 0, 0, 0],),
}
FLOATS = {"rms_norm_eps", "rope_theta"}
SAMPLING = {  # key after "general.sampling." → field of generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
NAMES = {  # tensors of a layer: their name → nanokv's, without those of gguf_layers.own_parts
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Tensors that stack the matrices of all experts.
STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Llama 3.1's context extension, stored as divisors of the frequencies.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DTYPES = {"F32": "float32", "F16": "float16"}  # any other type counts as bfloat16


def materialize(path: Path) -> Path:
    """The folder with the small files, made once per header.

    In the user's cache, or in a temporary folder if the cache is not writable.
    """
    found = read_gguf(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(found.header))
    here = Path(__file__).parent
    # Another version of this code may write other files.
    for source in (*here.glob("gguf_*.py"), here / "control_texts.py", here / "pooling.py"):
        digest.update(source.read_bytes())
    digest.update(str(path.resolve()).encode())
    folder = cache_folder() / f"{path.stem}-{digest.hexdigest()[:16]}"
    if (folder / POINTER).is_file():
        return folder
    files = small_files(found) | {POINTER: {"path": str(path.resolve())}}
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    for name, fields in files.items():
        (temporary / name).parent.mkdir(exist_ok=True)
        (temporary / name).write_text(
            json.dumps(fields, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    try:
        os.replace(temporary, folder)
    except OSError:  # another process was faster, or an incomplete folder exists
        shutil.rmtree(temporary if (folder / POINTER).is_file() else folder, ignore_errors=True)
        if temporary.exists():
            os.replace(temporary, folder)
    return folder


def cache_folder() -> Path:
    """The writable folder in $NANOKV_CACHE or the user's cache, else a new temporary folder."""
    base = os.environ.get("NANOKV_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base or Path.home() / ".cache") / "nanokv" / "gguf"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="nanokv-gguf-"))


def small_files(found: GgufFile) -> dict[str, dict]:
    """File name → content, checked."""
    from .gguf_tokenizer import tokenizer_files

    parts = found.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{found.path} is one of {parts} files; only a model in one file can be read",
            "llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
        )
    config = model_config(found)
    names_of(found, config)  # raises for an unknown tensor
    files = {"config.json": config, **tokenizer_files(found)}
    pooling = gguf_pooling(found.metadata)
    if pooling is not None:
        files[POOLING] = {"pooling_mode": pooling}
    sampling = sampling_fields(found)
    if sampling:
        files["generation_config.json"] = sampling
    return files


def sampling_fields(found: GgufFile) -> dict[str, Any]:
    """The sampling defaults as fields of generation_config.json; {} if the file has none."""
    fields = {}
    for key, field in SAMPLING.items():
        value = found.metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if type(value) not in (int, float):
            raise CheckpointError(
                f"{found.path}: general.sampling.{key} is {quote(value)}, not a number"
            )
        fields[field] = decimal(value)
    if fields.get("temperature", 0) > 0:
        fields["do_sample"] = True
    return fields


def architecture(found: GgufFile) -> str:
    """The architecture's name, checked to be one of FAMILY_OF."""
    name = found.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILY_OF:
        raise CheckpointError(
            f"{found.path}: general.architecture is {quote(name)}, which is not implemented",
            f"known: {', '.join(FAMILY_OF)}",
        )
    return name


def model_config(found: GgufFile) -> dict:
    """The fields of config.json, from the metadata and the shapes of tensors."""
    kind = architecture(found)
    own = own_keys(found, kind)
    fields: dict[str, Any] = {"model_type": FAMILY_OF[kind], "hidden_act": "silu"}
    fields |= {KEYS[key]: value for key, value in own.items() if key in KEYS}
    for name in FLOATS & fields.keys():
        fields[name] = decimal(fields[name])
    embedding = tensor(found, "token_embd.weight", 2)
    fields["vocab_size"] = embedding.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in found.tensors
    fields |= gguf_states.sizes(found.path, own, fields["model_type"])
    stateful = fields["model_type"] in gguf_states.KEYS  # the first layer has no attention
    matrix = tensor(found, "blk.0.ffn_up.weight" if stateful else "blk.0.attn_q.weight", 2)
    fields["torch_dtype"] = DTYPES.get(matrix.type.name, "bfloat16")
    check_lengths(found, own, fields)
    if fields["model_type"] in gguf_layers.PERMUTED:
        fields["attention_bias"] = "blk.0.attn_q.bias" in found.tensors
    if kind == "qwen3moe":
        # The same as in llama.cpp.
        fields |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        fields.setdefault("intermediate_size", fields.get("moe_intermediate_size"))
    elif FAMILIES[fields["model_type"]].stacked:
        # All layers have experts, so that feed_forward_length means the same.
        width = fields.get("intermediate_size")
        fields["intermediate_size"] = fields.pop("moe_intermediate_size", width)
    elif fields.pop("num_experts", 0):
        raise CheckpointError(
            f"{found.path}: a mixture of experts of architecture {quote(kind)} is not implemented"
        )
    fields["rope_parameters"] = rope(found, own, fields)
    del fields["rope_theta"]
    return fields | gguf_layers.layer_fields(found.path, own, fields)


def own_keys(found: GgufFile, kind: str) -> dict[str, Any]:
    """The metadata of the architecture, without its name; CheckpointError for an unknown key."""
    own = {}
    layers = gguf_layers.keys_of(FAMILY_OF[kind])
    for key, value in found.metadata.items():
        if not key.startswith(f"{kind}."):
            continue
        key = key.removeprefix(f"{kind}.")
        known = key in KEYS or key in CHECKED | ROPE_SCALING | HARMLESS | layers
        if not known and not is_neutral(key, value):
            raise CheckpointError(
                f"{found.path}: {kind}.{quote(key)[1:-1]} {quote(value)} is not implemented: "
                "it may change the maths"
            )
        own[key] = value
    return own


def is_neutral(key: str, value: Any) -> bool:
    """Whether a key that is in no other table has no effect."""
    if key in NEUTRAL:
        return value in NEUTRAL[key]
    return is_off(key.rpartition(".")[2], value)


def decimal(value: Any) -> Any:
    """A float32's shortest decimal: 9.999999747378752e-06 → 1e-05. Other values are unchanged."""
    import numpy

    if not isinstance(value, float):
        return value
    return float(str(numpy.float32(value)))


def check_lengths(found: GgufFile, own: dict, fields: dict) -> None:
    """CheckpointError for sizes that disagree. Sets the defaults of absent sizes in `fields`."""
    fields.setdefault("rope_theta", 10_000.0)
    heads = fields.get("num_attention_heads")
    width = fields.get("hidden_size")
    # OpenELM and others have a list, one value per layer.
    if type(heads) is not int or type(width) is not int or heads < 1:
        raise CheckpointError(
            f"{found.path}: head_count {quote(heads)} and embedding_length {quote(width)} must be "
            "whole numbers"
        )
    fields.setdefault("num_key_value_heads", heads)
    head_dim = fields.setdefault("head_dim", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        partly = key == gguf_states.ROTATED and fields["model_type"] == "qwen3_5_text"
        if own.get(key, head_dim) != head_dim and not partly:
            raise CheckpointError(
                f"{found.path}: {key} is {quote(own[key])}, "
                f"the heads have {quote(head_dim)} dimensions"
            )
    rows = fields["vocab_size"]
    if own.get("vocab_size", rows) != rows:
        raise CheckpointError(
            f"{found.path}: vocab_size is {quote(own['vocab_size'])}, "
            f"the embedding has {rows:,} rows"
        )


def rope(found: GgufFile, own: dict, fields: dict) -> dict:
    """rope_parameters: theta and the context extension.

    A factor without a type means linear.
    """
    theta = {"rope_theta": fields["rope_theta"]}
    kind = own.get("rope.scaling.type", "linear")
    if kind == "yarn":
        return theta | {"rope_type": "yarn"} | yarn(found, own)
    # llama.cpp multiplies by it for every type.
    attn_factor = attention_multiplier(found, own)
    if attn_factor != 1:
        raise CheckpointError(
            f"{found.path}: rope.scaling.attn_factor {attn_factor:g} with type {quote(kind)} is "
            "not implemented: with yarn it is"
        )
    if ROPE_FACTORS in found.tensors:
        return theta | {"rope_type": "llama3"} | llama3(found, fields)
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind != "none" and (kind != "linear" or factor not in (0.0, 1.0)):
        what = f"rope.scaling.type {quote(kind)} with factor {quote(factor)}"
        raise CheckpointError(f"{found.path}: {what} is not implemented: yarn is")
    return theta | {"rope_type": "default"}


def yarn(found: GgufFile, own: dict) -> dict:
    """The fields of YaRN in config.json."""
    fields = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    said = {
        fields[key]: decimal(own[f"rope.scaling.{key}"])
        for key in fields
        if f"rope.scaling.{key}" in own
    }
    attn_factor = attention_multiplier(found, own)
    if attn_factor != 1:
        said["attn_factor"] = attn_factor
    return said


def attention_multiplier(found: GgufFile, own: dict) -> float:
    """The multiplier of YaRN's 0.1 ln(factor) + 1. (config.json's attention_factor replaces it.)

    llama.cpp's converter has used both keys. Its --help describes the second one as a multiplier of
    attention's magnitude too.
    """
    said = [own.get(f"rope.scaling.{key}", 1.0) for key in ("attn_factor", "yarn_attn_factor")]
    if not all(type(value) is float for value in said):
        raise CheckpointError(
            f"{found.path}: rope.scaling.attn_factor {quote(said)}: numbers were expected"
        )
    return math.prod(map(decimal, said))


def llama3(found: GgufFile, fields: dict) -> dict:
    """The rope_parameters of Llama 3.1's rule that give the stored divisors.

    CheckpointError if no factor gives them.
    """
    import numpy

    info = tensor(found, ROPE_FACTORS, 1)
    if info.type.name != "F32" or info.shape != (fields["head_dim"] // 2,):
        raise CheckpointError(
            f"{found.path}: {ROPE_FACTORS} is {info.type.name} {list(info.shape)}, not F32 "
            f"[{fields['head_dim'] // 2}]"
        )
    stored = numpy.fromfile(found.path, "<f4", info.shape[0], offset=info.start).astype(float)
    rule = {"factor": float(stored.max())} | LLAMA3
    expected = llama3_divisors(rule, fields["head_dim"], fields["rope_theta"])
    if not numpy.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{found.path}: {ROPE_FACTORS} does not follow Llama 3.1's rule with factor "
            f"{rule['factor']:g}, which is the one that is implemented"
        )
    return rule


def llama3_divisors(rule: dict, head_dim: int, theta: float) -> Any:
    """(D/2,) numbers by which Llama 3.1's rule divides the frequencies of RoPE."""
    import numpy

    wavelength = 2 * math.pi * theta ** (numpy.arange(0, head_dim, 2) / head_dim)
    turns = rule["original_max_position_embeddings"] / wavelength
    low = rule["low_freq_factor"]
    high = rule["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - keep) / rule["factor"] + keep)


def tensor(found: GgufFile, name: str, dimensions: int) -> TensorInfo:
    """A required tensor with this number of dimensions; CheckpointError otherwise."""
    info = found.tensors.get(name)
    if info is None or len(info.shape) != dimensions:
        have = "is missing" if info is None else f"has shape {list(info.shape)}"
        raise CheckpointError(f"{found.path}: tensor {quote(name)} {have}")
    return info


# --- tensors --------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Where the values of one tensor are: rows of a tensor of the file."""

    info: TensorInfo
    first: int
    rows: int
    # Heads of a matrix with permuted rows, else 0. llama.cpp permutes them so that the pairs that
    # RoPE rotates are adjacent.
    heads: int = 0
    forms: tuple[Form, ...] = ()


def end_names(model_type: str) -> dict[str, str]:
    """Their name → nanokv's, of the tensors outside the layers."""
    found = gguf_layers.ends(model_type)
    return {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in found.items()}


def part_names(model_type: str) -> dict[str, str]:
    """Their name → nanokv's, of the tensors in a layer, without the stacked ones."""
    parts = NAMES | gguf_layers.own_parts(model_type)
    found = {
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in parts.items()
        for kind in ("weight", "bias")
    }
    return found | gguf_layers.own_parameters(model_type)


def names_of(found: GgufFile, config: dict) -> dict[str, Rows | gguf_stacks.Stack]:
    """Hugging Face's name → its place.

    An expert is a slice of a stacked tensor. In gpt-oss all experts are one tensor here too.
    """
    kind = config["model_type"]
    named: dict[str, Rows | gguf_stacks.Stack] = {}
    in_stacks: set[str] = set()
    if FAMILIES[kind].stacked:
        stacks = gguf_stacks.stacks(found)
        in_stacks = {part.name for stack in stacks.values() for part in stack.parts}
        named |= stacks
    ends, parts = end_names(kind), part_names(kind)
    for name, info in found.tensors.items():
        if name == ROPE_FACTORS or name in in_stacks:
            continue
        slices = slices_of(name, info, ends, parts)
        if not slices:
            raise CheckpointError(
                f"{found.path}: tensor {quote(name)} {list(info.shape)} has no place in "
                f"{quote(kind)}"
            )
        for ours, (first, rows) in slices.items():
            named[to_hugging_face(ours, kind)] = Rows(info, first, rows)
    return named


def slices_of(
    name: str, info: TensorInfo, ends: dict[str, str], parts: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """nanokv's name → (first row, rows), for one tensor of the file; {} if it is unknown.

    ends, parts: the names outside the layers, and in a layer.
    """
    whole = (0, info.shape[0])
    if name in ends:
        return {ends[name]: whole}
    layer = re.fullmatch(r"blk\.(\d{1,5})\.(.+)", name)
    if layer is None:
        return {}
    prefix = f"layers.{layer[1]}"
    leaf = layer[2]
    if leaf in parts:
        return {f"{prefix}.{parts[leaf]}": whole}
    stack, _, kind = leaf.partition(".")
    if stack in STACKED and kind == "weight" and len(info.shape) == 3:
        experts, rows, _ = info.shape
        prefix = f"{prefix}.mlp.experts"
        return {f"{prefix}.{e}.{STACKED[stack]}.weight": (e * rows, rows) for e in range(experts)}
    return {}


def places(folder: Path) -> tuple[Path, dict[str, Rows | gguf_stacks.Stack]]:
    """(the GGUF file of the folder, Hugging Face's name → place of the values)."""
    path = Path(str(read_object(folder / POINTER).get("path")))
    if not path.is_file():
        raise CheckpointError(f"{path} is gone: {folder} holds its tokenizer and config only")
    found = read_gguf(path)
    config = read_object(folder / "config.json")
    kind = config["model_type"]
    heads = {}
    if kind in gguf_layers.PERMUTED:
        heads["q_proj"] = config["num_attention_heads"]
        heads["k_proj"] = config["num_key_value_heads"]
    tensors = names_of(found, config)
    for name, place in tensors.items():
        if isinstance(place, Rows):
            leaf = name.split(".")[-2]
            forms = gguf_layers.forms(config, name)
            tensors[name] = place._replace(heads=heads.get(leaf, 0), forms=forms)
    return path, tensors


def tensors_at(place: Rows | gguf_stacks.Stack) -> tuple[TensorInfo, ...]:
    """The tensors of the file that hold the values."""
    if isinstance(place, Rows):
        return (place.info,)
    return place.parts
