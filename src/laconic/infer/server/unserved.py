"""Fields of OpenAI's API, of vLLM's and of SGLang's that are not served, and the values that ask for nothing.

Clients send such values unasked. Any other value is refused by the field's name; null is as if left out.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI's
    "best_of": (1,),
    "suffix": ("",),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "ec_transfer_params": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang's
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "ebnf": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "session_params": ({},),
}

NEUTRAL_IN_COMPLETIONS: Neutral = _NEUTRAL | {"add_special_tokens": (True,)}

NEUTRAL_IN_CHATS: Neutral = _NEUTRAL | {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
    # SGLang's; no reasoning is told apart from the text
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
}

NEUTRAL_IN_TOKENIZE: Neutral = {
    name: NEUTRAL_IN_CHATS[name]
    for name in (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "media_io_kwargs",
        "mm_processor_kwargs",
    )
}

NEUTRAL_IN_RESPONSES: Neutral = {
    # OpenAI's
    "access_programs": ({},),
    "background": (False,),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([], ["reasoning.encrypted_content"]),  # there is no reasoning to encrypt
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    # vLLM's
    **{
        name: NEUTRAL_IN_CHATS[name]
        for name in (
            "cache_salt",
            "include_stop_str_in_output",
            "kv_transfer_params",
            "mm_processor_kwargs",
            "priority",
            "skip_special_tokens",
            "vllm_xargs",
        )
    },
    "enable_response_messages": (False,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "previous_input_messages": ([],),
    "previous_response": (),
    "repetition_penalty": (1,),
    "seed": (),
    "stop": ([],),
    "structured_outputs": ({},),
    "top_k": (0, -1),
}


def asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value of a field is null or a neutral one; true is not 1, and 0 not false."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
