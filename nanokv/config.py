"""The shape of a model: what the model reads. config_file.py checks the published files that it comes from.

Field names are Hugging Face's own, so a config.json is all that is needed.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from nanokv import config_file
from nanokv.config_file import yarn_scale
from nanokv.errors import ConfigError
from weights_loader import families, names
from weights_loader.strict import read_object


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023, arXiv 2309.00071), as transformers' `rope_type: yarn`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None = 0.1 ln(factor) + 1
    truncate: bool = True  # the borders between fast and slow pairs are whole numbers

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by: scores get sharper, by its square."""
        return yarn_scale(self.factor) if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's context extension, as transformers' `rope_type: llama3`: slow pairs of dimensions turn slower."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes through `num_experts_per_tok` of `num_experts` small MLPs."""

    num_experts: int  # E
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False  # the weights of the chosen experts sum to 1
    decoder_sparse_step: int = 1  # every so many layers have experts, the others one MLP
    mlp_only_layers: tuple[int, ...] = ()  # these have one MLP too


@dataclass(frozen=True)
class Config:
    """H query heads of width D share Hk KV heads; D is a field of its own: for Qwen3-0.6B H·D = 2048, C = 1024."""

    vocab_size: int  # V
    hidden_size: int  # C
    intermediate_size: int
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # Hk
    head_dim: int  # D
    # The context: YaRN's factor × original where that is more than the file says.
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    torch_dtype: str = "float32"
    model_type: str = "qwen3"
    llama3: Llama3Rope | None = None
    experts: Experts | None = None

    @property
    def family(self) -> families.Family:
        """What config.json does not say."""
        return families.FAMILIES[self.model_type]

    @property
    def qk_norm(self) -> bool:
        """Is there a norm over each head of q and k?"""
        return self.family.qk_norm

    @property
    def qkv_bias(self) -> bool:
        """Have the projections to q, k and v a bias?"""
        return self.attention_bias if self.family.qkv_bias is None else self.family.qkv_bias

    @property
    def output_bias(self) -> bool:
        """Has the projection of attention's output a bias?"""
        return self.attention_bias if self.family.output_bias is None else self.family.output_bias

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of this layer; None: it has one MLP."""
        return (
            self.experts if self.experts and names.is_sparse(asdict(self.experts), layer) else None
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> "Config":
        """Read `folder/config.json`, or the file itself when `folder` is a path to a config.json."""
        path = Path(folder)
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_object(path, ConfigError))

    @classmethod
    def from_dict(cls, fields: dict) -> "Config":
        """Check every field that changes the maths; raises ConfigError with the field's name and value."""
        found = config_file.model_fields(fields)
        kinds = {"yarn": Yarn, "llama3": Llama3Rope, "experts": Experts}
        return cls(
            **found | {name: kind(**found[name]) for name, kind in kinds.items() if found.get(name)}
        )

    def __repr__(self) -> str:
        """The sizes in the letters of model.py; the rest where it differs from the default."""
        sizes = f"V {self.vocab_size} C {self.hidden_size} I {self.intermediate_size} L {self.num_hidden_layers}"
        heads = f"H {self.num_attention_heads} Hk {self.num_key_value_heads} D {self.head_dim}"
        rope = f"context {self.max_position_embeddings}, rope_theta={self.rope_theta:g}"
        rope += f", yarn ×{self.yarn.factor:g}" if self.yarn else ""
        rope += f", llama3 ×{self.llama3.factor:g}" if self.llama3 else ""
        if self.experts:
            sizes += f" experts {self.experts.num_experts_per_tok}/{self.experts.num_experts}"
        flags = ", bias" * self.qkv_bias + ", tied" * self.tie_word_embeddings
        return f"Config({self.family.title}: {sizes} {heads}, {rope}{flags})"

    def to_dict(self) -> dict:
        """The config.json of this model: `from_dict(to_dict())` gives an equal config."""
        return config_file.written(asdict(self), self.family)


@dataclass(frozen=True)
class GenerationConfig:
    """The checkpoint's own generation_config.json: which ids end an answer, and how its authors sample. `nanokv.load`
    adds the ends that other files name (nanokv/text/endings.py)."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0  # 0 = greedy, which is what `do_sample: false` means
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike, config: dict | None = None
    ) -> "GenerationConfig":
        """Read generation_config.json, and config.json unless `config` says what is in it."""
        config = config_file.optional(Path(folder) / "config.json") if config is None else config
        return cls.from_fields(
            config, config_file.optional(Path(folder) / "generation_config.json")
        )

    @classmethod
    def from_fields(cls, config: dict, generation: dict) -> "GenerationConfig":
        """Of what both files say: generation_config.json goes first; of config.json's many fields those
        count that old checkpoints keep there."""
        return cls.from_dict(config_file.generation_settings(config, generation))

    @classmethod
    def from_dict(cls, fields: dict) -> "GenerationConfig":
        """Values of generation_config.json; sampling figures count only with `do_sample: true`, as in transformers.

        A field that would change the answer there and is not implemented here warns with its name and value.
        """
        return cls(**config_file.generation_fields(fields))

    def to_dict(self) -> dict:
        """The generation_config.json of these values: `from_dict(to_dict())` gives equal ones."""
        fields = {name: value for name, value in asdict(self).items() if name != "eos_token_ids"}
        sampled = self.temperature > 0
        if not sampled:  # then only the penalty counts
            fields = {"repetition_penalty": self.repetition_penalty}
        eos = {"eos_token_id": list(self.eos_token_ids)} if self.eos_token_ids else {}
        return {"do_sample": sampled} | eos | fields
