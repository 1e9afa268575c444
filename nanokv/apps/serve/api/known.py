"""Fields of other servers' requests, and what becomes of them here: vLLM, llama.cpp, SGLang, Ollama, TGI, OpenAI.

A field that would change the answer is done (requests.py) or refused by its name, never ignored. Each one that is not
done stands here with the values that ask for nothing: those are accepted. `HARMLESS` changes no token of an answer.
tests/serve/test_serve_schema.py compares the table of docs/serve.md with these.
"""

from typing import Annotated, Any, NamedTuple

from nanokv.apps.serve.api.fields import Nothing


class Off(NamedTuple):
    """A field that is not done."""

    values: tuple = ()  # that ask for nothing; null always does
    hint: str = ""  # what does nearly the same here


HARMLESS: dict[str, Any] = dict.fromkeys((
    # whose request it is, how soon it is answered, what is kept of it
    "user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "rid", "session_id", "priority",
    "custom_labels", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt", "extra_key",
    "cache_prompt", "n_cache_reuse", "id_slot", "slot_id", "keep_alive", "prediction", "speculative",
    "num_draft_tokens",
    # what is told beside the answer
    "timings_per_token", "return_progress", "sse_ping_interval", "stream_interval", "details",
    # how a context that is too small is cut: here it is an error
    "n_keep", "n_discard", "num_keep", "truncation_side",
    # parts of a setting whose main field is refused, unless it is off
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "spaces_between_special_tokens", "grammar_lazy", "preserved_tokens",
    "grammar_triggers", "media_io_kwargs", "mm_processor_kwargs", "guided_decoding_backend",
    "guided_whitespace_pattern",
    # what a program is started with
    "num_gpu", "num_thread", "num_batch", "main_gpu", "use_mmap", "use_mlock", "numa", "low_vram",
), (Any, None))

_FORMAT = "response_format takes a JSON schema"
_TOP = "the fields stand at the top of the request"
_LENGTH = "nanokv serve --context N is the length for all requests"
# What they are about → fields that are done at neither address.
REFUSED: dict[str, dict[str, Off]] = {
    "which token is drawn": {
        "logit_bias": Off(({}, [])), "presence_penalty": Off((0,), "repetition_penalty is done"),
        "frequency_penalty": Off((0,), "repetition_penalty is done"),
        "presence_context_size": Off((0,)), "frequency_context_size": Off((0,)),
        "penalize_nl": Off((False,)), "penalize_newline": Off((False,)), "penalty_prompt": Off(),
        "repetition_context_size": Off(), "no_repeat_ngram_size": Off((0,)),
        "encoder_repetition_penalty": Off((1,)), "repetition_penalty_range": Off((-1, 0)),
        "typical_p": Off((1,)), "typical": Off((1,)), "tfs_z": Off((1,)), "tfs": Off((1,)),
        "top_a": Off((0,)), "top_n_sigma": Off((-1, 0)), "epsilon_cutoff": Off((0,)),
        "eta_cutoff": Off((0,)), "mirostat": Off((0,)), "mirostat_mode": Off((0,)),
        "dynatemp_range": Off((0,)), "dynatemp_low": Off(), "dynatemp_high": Off(),
        "dynamic_temperature": Off((False,)), "smoothing_factor": Off((0,)),
        "xtc_probability": Off((0,)), "dry_multiplier": Off((0,)), "adaptive_target": Off((-1,)),
        "adaptive_decay": Off(), "min_keep": Off((0, 1)), "samplers": Off(([],)),
        "sampler_seq": Off(("",)), "temperature_last": Off((False,)),
        "do_sample": Off((), "temperature 0 is greedy"), "penalty_alpha": Off((0,)),
        "guidance_scale": Off((1,)), "negative_prompt": Off(("",)), "bad_words": Off(([],)),
        "bad_words_ids": Off(([],)), "banned_tokens": Off(([],)), "allowed_token_ids": Off(),
        "logits_processors": Off(([],)), "logits_processor": Off(([],)),
        "custom_logit_processor": Off(), "custom_params": Off(({},)), "vllm_xargs": Off(({},)),
        "watermark": Off((False,)), "watermarking": Off((False,)), "repetition_detection": Off(),
        "random_seed": Off((), "seed is done"), "custom_token_bans": Off(("",)),
        "banned_strings": Off(([], "")), "ban_eos_token": Off((False,), "ignore_eos is done"),
        "logit_bias_type": Off(("input_ids",)), "token_healing": Off((False,)),
    },
    "beams": {
        "best_of": Off((1,)), "use_beam_search": Off((False,)), "length_penalty": Off((1,)),
        "early_stopping": Off((False,)), "num_beams": Off((1,)), "beam_width": Off((1,)),
        "n_cmpl": Off((1,), "n is done"),
        "num_return_sequences": Off((1,), "n is done"),
    },
    "where an answer ends": {
        "min_tokens": Off((0,)), "min_new_tokens": Off((0,)), "stop_regex": Off(([], "")),
        "stop_sequences": Off(([],), "stop is done"),
        "stopping_strings": Off(([],), "stop is done"),
        "stop_strings": Off(([], ""), "stop is done"), "stop_words": Off(([], ""), "stop is done"),
        "stop_sequence": Off(([], ""), "stop is done"),
        "stop_token": Off((), "stop_token_ids is done"), "stop_tokens": Off(([],), "stop is done"),
        "eos_token_id": Off((), "stop_token_ids is done"),
        "eos_token_ids": Off((), "stop_token_ids is done"), "t_max_prompt_ms": Off((0, -1)),
        "max_length": Off((), "max_tokens is done"), "min_length": Off((0,)),
        "max_output_tokens": Off((), "max_tokens is done"), "no_stop_trim": Off((False,)),
        "n_indent": Off((0,)), "t_max_predict_ms": Off((0, -1)), "max_time": Off(),
        "thinking_budget": Off((-1,)), "thinking_token_budget": Off((-1,)),
        "thinking_budget_tokens": Off((-1,)), "reasoning_budget": Off((-1,)),
        "reasoning_budget_tokens": Off((-1,)),
    },
    "grammars": {
        "structured_outputs": Off(({},), _FORMAT), "guided_json": Off((), _FORMAT),
        "guided_regex": Off(), "guided_choice": Off((), "a JSON schema may have an enum"),
        "guided_grammar": Off(), "regex": Off(("",)), "ebnf": Off(("",)), "grammar": Off(("",)),
        "structural_tag": Off(), "json_schema": Off(({}, ""), _FORMAT),
        "format": Off(("",), _FORMAT), "json_mode": Off((False,), _FORMAT),
        "grammar_string": Off(("",)),
    },
    "the prompt": {
        "suffix": Off(("",)), "truncate_prompt_tokens": Off(), "truncate": Off((False,)),
        "truncation": Off(("disabled",)), "transforms": Off(([],)), "prompt_embeds": Off(),
        "input_ids": Off(), "multi_modal_data": Off(({},)), "images": Off(([],)),
        "audios": Off(([],)), "videos": Off(([],)), "input_extra": Off(([],)),
        "num_ctx": Off((), _LENGTH), "n_ctx": Off((), _LENGTH), "context": Off(([],)),
        "system": Off(("",)), "template": Off(("",)), "raw": Off((False,)),
        "image_data": Off(([],)), "system_prompt": Off(("",), "a message of the role system"),
        "truncation_length": Off((), _LENGTH), "session_params": Off(({},)),
        "generation_config": Off(({}, ""), _TOP),
        "options": Off(({},), _TOP), "parameters": Off(({},), _TOP),
        "extra_body": Off(({},), _TOP),
    },
    "other weights": {
        "lora": Off(([],)), "lora_path": Off(("",)), "lora_request": Off(),
        "adapter_id": Off(("",)), "adapters": Off(("",)), "draft_model": Off(("",)),
    },
    "what is told": {
        "skip_special_tokens": Off((True,)), "detokenize": Off((True,)),
        "return_full_text": Off((False,)), "prompt_logprobs": Off((0,)),
        "logprob_token_ids": Off(([],)), "n_probs": Off((0,), "logprobs and top_logprobs"),
        "top_n_tokens": Off((0,)), "post_sampling_probs": Off((False,)),
        "decoder_input_details": Off((False,)), "return_tokens": Off((False,)),
        "return_token_ids": Off((False,)), "return_tokens_as_token_ids": Off((False,)),
        "return_prompt_token_ids": Off((False,)), "return_prompt_text": Off((False,)),
        "return_token_offsets": Off((False,)), "return_hidden_states": Off((False,)),
        "return_routed_experts": Off((False,)), "return_meta_info": Off((False,)),
        "return_cached_tokens_details": Off((False,)), "response_fields": Off(([],)),
        "moderation": Off(),
    },
    "chats": {
        "functions": Off(([],), "tools is done"),
        "function_call": Off(("none", "auto"), "tool_choice is done"),
        "modalities": Off((["text"],)), "audio": Off(), "web_search_options": Off(),
        "verbosity": Off(("medium",)), "add_generation_prompt": Off((True,)),
        "continue_final_message": Off((False,)), "documents": Off(([],)),
        "include_reasoning": Off((True,)), "separate_reasoning": Off((True,)),
        "stream_reasoning": Off((True,)), "reasoning_format": Off(("auto", "deepseek")),
        "thinking_forced_open": Off((False,)), "reasoning_in_content": Off((False,)),
        "parse_tool_calls": Off((True,)), "parse_reasoning": Off((True,)),
        "tool_prompt": Off(("",)), "guideline": Off(), "role_mapping": Off(), "task": Off(),
        "plugins": Off(([],)), "safe_prompt": Off((False,)), "prompt_mode": Off(),
        "enable_search": Off((False,)), "prefill": Off(("",)),
    },
}
NOT_DONE = {name: one for table in REFUSED.values() for name, one in table.items()}

_TEXTS = "a chat template is what /v1/chat/completions uses"
CHAT_ONLY: dict[str, Off] = {  # not done by completions
    "messages": Off((), _TEXTS), "tools": Off(([],)), "tool_choice": Off(("none", "auto")),
    "response_format": Off(({"type": "text"},)), "top_logprobs": Off((0,), "logprobs is the number"),
    "chat_template": Off((), _TEXTS), "chat_template_kwargs": Off(({},), _TEXTS), "enable_thinking": Off((), _TEXTS),
    "reasoning_effort": Off((), _TEXTS), "reasoning": Off(({},), _TEXTS), "thinking": Off((), _TEXTS),
    "think": Off((), _TEXTS),
}
TEXT_ONLY: dict[str, Off] = {  # not done by chats
    "prompt": Off((), "messages is what a chat has"), "echo": Off((False,)), "add_special_tokens": Off((False,)),
}
def refused(*tables: dict[str, Off]) -> dict[str, Any]:
    """The fields of these tables, for pydantic.create_model."""
    rows = [row for table in tables for row in table.items()]
    return {name: (Annotated[Any, Nothing(*one.values, hint=one.hint)], None) for name, one in rows}
