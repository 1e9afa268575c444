"""The shape of a model. config_file.py reads and checks the published config.json files.

Field names are Hugging Face's.
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanokv import config_file
from nanokv.config_file import yarn_scale
from nanokv.errors import ConfigError
from weights_loader import families, names
from weights_loader.strict import read_object


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), as transformers' `rope_type: yarn`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None = 0.1 ln(factor) + 1
    truncate: bool = True  # round the first and last pair of the gradual part to integers

    @property
    def scale(self) -> float:
        """The factor for cos and sin. Attention scores grow by its square."""
        if self.attention_factor is None:
            return yarn_scale(self.factor)
        return self.attention_factor


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's context extension, as transformers' `rope_type: llama3`."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes through a few of the small MLPs (Qwen3-MoE)."""

    num_experts: int  # E
    num_experts_per_tok: int  # k
    moe_intermediate_size: int
    norm_topk_prob: bool = False  # scale the weights of the chosen experts to a sum of 1
    decoder_sparse_step: int = 1  # every n-th layer has experts, the others one MLP
    mlp_only_layers: tuple[int, ...] = ()  # layers with one MLP despite the step


@dataclass(frozen=True)
class Linear:
    """A layer with the gated delta rule: a state of fixed size (recurrent.py)."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int  # Dk
    linear_value_head_dim: int  # Dv
    linear_conv_kernel_dim: int  # K

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class Conv:
    """A layer with a short convolution alone: it keeps its last inputs (recurrent.py)."""

    conv_L_cache: int  # K
    conv_bias: bool = False


# Layers without keys and values → what they keep, in the words of reports and errors.
STATES = {"linear_attention": "a recurrent state", "conv": "a short convolution"}


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a model. H·D may differ from C: in Qwen3-0.6B 2,048 and 1,024."""

    vocab_size: int  # V
    hidden_size: int  # C
    intermediate_size: int
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # Hk
    head_dim: int  # D
    max_position_embeddings: int  # the context; with YaRN at least factor × original
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    torch_dtype: str = "float32"
    model_type: str = "qwen3"
    llama3: Llama3Rope | None = None
    experts: Experts | None = None
    # "full_attention", "sliding_attention", or a key of STATES per layer; () = all full.
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None  # positions that a "sliding_attention" layer sees
    local_rope_theta: float | None = (
        None  # RoPE of these layers, without yarn; None = as the others
    )
    unrotated: tuple[int, ...] = ()  # numbers of the layers without RoPE
    linear: Linear | None = None  # sizes of "linear_attention" layers
    conv: Conv | None = None  # sizes of "conv" layers
    partial_rotary_factor: float = 1.0  # share of the D dimensions that RoPE rotates
    query_pre_attn_scalar: int | None = None  # replaces D in 1 / sqrt(D); None = D
    kv_sharing_factor: int = 1  # so many layers in turn use the keys and values of the first

    @property
    def family(self) -> families.Family:
        """Facts about the family that config.json omits."""
        return families.FAMILIES[self.model_type]

    @property
    def qk_norm(self) -> bool:
        """True if each head of q and k has a norm."""
        return self.family.qk_norm

    @property
    def qkv_bias(self) -> bool:
        """True if the projections to q, k and v have a bias."""
        if self.family.qkv_bias is None:
            return self.attention_bias
        return self.family.qkv_bias

    @property
    def output_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        if self.family.output_bias is None:
            return self.attention_bias
        return self.family.output_bias

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of this layer, or None if it has one MLP."""
        if self.experts is None:
            return None
        if not names.is_sparse(asdict(self.experts), layer):
            return None
        return self.experts

    @property
    def rotary_dim(self) -> int:
        """The first dimensions of a head, which RoPE rotates; the others stay as they are."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_state(self, layer: int) -> bool:
        """Whether this layer keeps a state, or a convolution's inputs, not keys and values."""
        return any(kind in STATES for kind in self.layer_types[layer : layer + 1])

    @property
    def states(self) -> int:
        """How many layers have no keys and values."""
        return sum(kind in STATES for kind in self.layer_types)

    @property
    def state_name(self) -> str:
        """What these layers keep, in words."""
        return STATES["linear_attention" if self.conv is None else "conv"]

    def window_of(self, layer: int) -> int | None:
        """How many positions this layer sees; None: all, 0: it keeps a state."""
        if self.has_state(layer):
            return 0
        if "sliding_attention" not in self.layer_types[layer : layer + 1]:
            return None
        return self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`window_of` every layer."""
        return tuple(map(self.window_of, range(self.num_hidden_layers)))

    def shares_kv(self, layer: int) -> bool:
        """True if this layer uses the keys and values of an earlier one."""
        return layer % self.kv_sharing_factor > 0

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values of their own: the entries of a cache."""
        return -(-self.num_hidden_layers // self.kv_sharing_factor)

    @property
    def local(self) -> "Config | None":
        """The config with the RoPE of windowed layers; None: as the others."""
        if self.local_rope_theta is None:
            return None
        theta = self.local_rope_theta
        return replace(self, rope_theta=theta, yarn=None, llama3=None, local_rope_theta=None)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "Config":
        """Read `folder/config.json`; `folder` may also be the path of the file itself."""
        path = Path(folder)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_dict(read_object(path, ConfigError))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Config":
        """Check the fields of a config.json.

        Raises ConfigError with a field's name and value if it changes the maths and nanokv does not
        implement it.
        """
        found = config_file.model_fields(fields)
        kinds = {"yarn": Yarn, "llama3": Llama3Rope, "experts": Experts}
        kinds |= {"linear": Linear, "conv": Conv}
        for name, kind in kinds.items():
            if found.get(name):
                found[name] = kind(**found[name])
        return cls(**found)

    def __repr__(self) -> str:
        """The sizes with the letters of model.py, then what differs from the defaults."""
        sizes = f"V {self.vocab_size} C {self.hidden_size} I {self.intermediate_size}"
        sizes += f" L {self.num_hidden_layers}"
        if self.experts:
            sizes += f" experts {self.experts.num_experts_per_tok}/{self.experts.num_experts}"
        sizes += f" H {self.num_attention_heads} Hk {self.num_key_value_heads} D {self.head_dim}"
        notes = [f"context {self.max_position_embeddings}", f"rope_theta={self.rope_theta:g}"]
        windowed = self.layer_types.count("sliding_attention")
        if self.states:
            notes.append(f"{self.state_name} in {self.states} layers")
        if windowed:
            notes.append(f"window {self.sliding_window} in {windowed} layers")
        if self.kv_sharing_factor > 1:
            notes.append(f"keys of {self.num_kv_layers} layers")
        if self.unrotated:
            notes.append(f"no RoPE in {len(self.unrotated)} layers")
        if self.yarn:
            notes.append(f"yarn ×{self.yarn.factor:g}")
        if self.llama3:
            notes.append(f"llama3 ×{self.llama3.factor:g}")
        if self.qkv_bias:
            notes.append("bias")
        if self.tie_word_embeddings:
            notes.append("tied")
        return f"Config({self.family.title}: {sizes}, {', '.join(notes)})"

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json: `from_dict(to_dict())` gives an equal config."""
        return config_file.written(asdict(self), self.family)


@dataclass(frozen=True)
class GenerationConfig:
    """A checkpoint's generation_config.json: the ids that end an answer, and the sampling defaults.

    `nanokv.load` adds the end tokens that other files of the checkpoint name (text/endings.py).
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0  # 0 = greedy, as `do_sample: false`
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike[str], config: dict[str, Any] | None = None
    ) -> "GenerationConfig":
        """Read generation_config.json, and config.json unless its fields are passed as `config`."""
        if config is None:
            config = config_file.optional(Path(folder) / "config.json")
        generation = config_file.optional(Path(folder) / "generation_config.json")
        return cls.from_fields(config, generation)

    @classmethod
    def from_fields(cls, config: dict[str, Any], generation: dict[str, Any]) -> "GenerationConfig":
        """Merge both files; generation_config.json wins.

        Old checkpoints keep generation settings in config.json; its other fields are ignored.
        """
        return cls.from_dict(config_file.generation_settings(config, generation))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "GenerationConfig":
        """Read the values of a generation_config.json.

        Sampling values count only with `do_sample: true`, as in transformers. A field that would
        change the answer in transformers and is not implemented here gives a warning with its name
        and value.
        """
        return cls(**config_file.generation_fields(fields))

    def to_dict(self) -> dict[str, Any]:
        """The fields of a generation_config.json: `from_dict(to_dict())` gives equal values."""
        sampled = self.temperature > 0
        fields: dict[str, Any] = {"do_sample": sampled}
        if self.eos_token_ids:
            fields["eos_token_id"] = list(self.eos_token_ids)
        if not sampled:  # greedy: only the penalty has an effect
            fields["repetition_penalty"] = self.repetition_penalty
            return fields
        settings = asdict(self)
        del settings["eos_token_ids"]
        return fields | settings
