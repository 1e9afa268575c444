"""The answers of transformers to the same questions, if it is installed. No other file of this
package imports it.

transformers reads the same folder. Nothing is downloaded, no code of the checkpoint runs and no
pickle is opened. The model is loaded in its final dtype, because `.to(bfloat16)` would round the
rotary frequencies too. Attention is sdpa, the default of transformers.
"""

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.lab.study.debug import record
from nanokv.lab.verify.evidence import Evidence, Questions
from nanokv.loading import load as load_ours
from nanokv.support import installing
from weights_loader.gguf_model import POINTER


def version() -> str | None:
    """The version of transformers; None if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def answers(folder: Path, questions: Questions, dtype: torch.dtype) -> Evidence:
    """The evidence of transformers' model and tokenizer for this checkpoint."""
    with readable(folder) as place:
        model, tokenizer = load(place, dtype)
    templates = None
    if tokenizer.chat_template is not None:
        templates = [_render(tokenizer, c) for c in questions.conversations]
    return Evidence(
        f"transformers {version()}",
        Config.from_dict(model.config.to_dict()),
        _rope(model, questions.positions),
        [record(model, ids) for ids in questions.prompts],
        [_greedy(model, ids, questions.new_tokens) for ids in questions.prompts],
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in questions.texts],
        [tokenizer.decode(ids, skip_special_tokens=False) for ids in questions.id_lists],
        templates,
    )


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """A folder that transformers can open: `folder`, or for a GGUF file a temporary copy in fp32.

    transformers could read GGUF itself, but it splits text by one fixed rule for all files.
    """
    if not (folder / POINTER).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="nanokv-verify-") as copy:
        model, tokenizer = load_ours(folder, dtype=torch.float32, device="cpu")
        model.save(copy, tokenizer)
        yield Path(copy)


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer). NanoKVError if transformers cannot be imported, or refuses
    the checkpoint."""
    try:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    except ImportError as error:
        message = f"transformers {version()} is installed but cannot be used: {error}"
        raise NanoKVError(message, f"{installing.hint(['transformers'])}, or --alone") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _set_attn_factor(config, folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise NanoKVError(
            f"transformers {version()} cannot read {folder}: {error}",
            "--alone checks it without transformers",
        ) from error
    # greedy, without the checkpoint's sampling settings and end tokens
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.requires_grad_(False).eval(), tokenizer


def _set_attn_factor(config: Any, folder: Path) -> None:
    """transformers ignores YaRN's attn_factor, so set the attention_factor that nanokv derives from
    it."""
    rope = config.rope_parameters
    yarn = Config.from_folder(folder).yarn
    if yarn is not None and rope.pop("attn_factor", None) is not None:
        rope["attention_factor"] = yarn.scale


@torch.inference_mode()
def _rope(model: Any, positions: torch.Tensor) -> torch.Tensor:
    """cos and sin (2,P,D). The rotary buffers are fp32, whatever the dtype of the weights."""
    rotary = model.model.rotary_emb
    device = rotary.inv_freq.device
    cos, sin = rotary(torch.zeros(1, device=device), positions[None].to(device))
    return torch.stack((cos[0], sin[0])).cpu()


def _greedy(model: Any, ids: torch.Tensor, new_tokens: int) -> list[int]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()


def _render(tokenizer: Any, conversation: dict) -> str:
    options = {"add_generation_prompt": True, **conversation}
    messages = options.pop("messages")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # jinja2's errors, and any that code in the template causes
        return f"refused: {error}"
