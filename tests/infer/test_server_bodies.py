"""Bodies of requests: whatever comes is read or refused, by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from laconic.infer.sampling import Sampling
from laconic.infer.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from laconic.infer.server.conversation import StructuredOutputs
from laconic.infer.server.responses import ResponsesBody
from laconic.infer.server.wire import Refusal

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab1", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "echo", "logit_bias", "unknown"})
GOOD: dict[type[CompletionBody] | type[ChatBody], dict[str, Any]] = {
    CompletionBody: {"model": "m", "prompt": "x"},
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
}


def read(kind: Any, values: dict[str, Any]) -> tuple[Any, Refusal | None]:
    try:
        return parse_body(kind, json.dumps(values).encode()), None
    except Refusal as refusal:
        return None, refusal


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_fields_are_read_or_refused_by_name(kind: Any, fields: dict[str, Any]) -> None:
    body, refusal = read(kind, GOOD[kind] | fields)
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.param is not None
        assert refusal.param.partition(".")[0] in fields
        assert refusal.param in str(refusal)
        return
    # What has been read can be asked of an engine.
    Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed or 0,
        max_new_tokens=body.longest_answer or body.min_tokens or 1,
        logprobs=body.num_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        rules=body.rules,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
    )
    assert all(name in type(body).model_fields or not value for name, value in fields.items())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(st.binary(max_size=30))
def test_bytes_that_are_no_body_are_refused(kind: Any, content: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        parse_body(kind, content)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"seed": 1, "n": 2, "seed": 3', "'seed' comes twice"),
        ('"chat_template_kwargs": {"a": 1, "a": 1}', "'a' comes twice"),
        ('"chat_template_kwargs": {"a": 1e400}', "1e400 is a number that no float can hold"),
    ],
)
def test_nothing_of_a_body_is_dropped_by_its_parser(fields: str, message: str) -> None:
    body = json.dumps(GOOD[ChatBody])[:-1] + f", {fields}}}"
    with pytest.raises(Refusal, match=message):
        parse_body(ChatBody, body.encode())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one"),
        ([{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}], "one"),
        ([{"type": "text", "text": "o", "prompt_cache_breakpoint": {"mode": "explicit"}}], "o"),
        ([{"type": "text", "text": "o", "cache_control": {"type": "ephemeral"}}], "o"),
        ("", ""),
    ],
)
def test_contents_of_messages(content: Any, text: str) -> None:
    values = {"model": "m", "messages": [{"role": "user", "content": content, "name": "me"}]}
    message = parse_body(ChatBody, json.dumps(values).encode()).messages[0]
    assert (message.role, message.content, message.name) == ("user", text, "me")


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatBody, chat_params.CompletionCreateParamsBase),
        (CompletionBody, completion_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openais_client_is_known(kind: Any, params: Any) -> None:
    """Null is as if left out; what is not served is refused as such, not as a field that nobody knows."""
    for name in set(params.__annotations__) - GOOD[kind].keys():
        assert read(kind, GOOD[kind] | {name: None})[1] is None, name
        _, refusal = read(kind, GOOD[kind] | {name: {"odd": [1]}})
        assert refusal is None or (refusal.param, refusal.code) != (name, "unknown_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "function_call": "auto", "functions": []},
        {
            "modalities": ["text"],
            "verbosity": "medium",
            "reasoning_effort": "none",
            "response_format": {"type": "text"},
        },
        {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "user": "me", "safety_identifier": "me"},
        {"top_k": -1, "return_token_ids": False},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"}},
    ],
)
def test_fields_that_change_no_token_are_taken(fields: dict[str, Any]) -> None:
    body, refusal = read(ChatBody, GOOD[ChatBody] | fields)
    assert refusal is None
    assert body.rules == {}


def test_marks_of_caches_reach_no_template() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "add"}}
    fields = {"messages": [{"role": "user", "content": "Hi"} | mark], "tools": [tool | mark]}
    body, refusal = read(ChatBody, GOOD[ChatBody] | fields)
    assert refusal is None
    assert [each.for_template() for each in body.messages] == [{"role": "user", "content": "Hi"}]
    assert [each.for_template() for each in body.tools] == [tool]


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
        ({"min_p": 0, "min_tokens": 0}, {"min_p": None, "min_new_tokens": None, "min_length": None}),
        ({"min_p": 0.1, "min_tokens": 3}, {"min_p": 0.1, "min_new_tokens": 3, "min_length": None}),
        ({"logit_bias": {"7": -100, "8": 2.5}}, {"sequence_bias": [[[7], -100.0], [[8], 2.5]]}),
        ({"logit_bias": {}}, {}),
    ],
)
def test_rules_of_a_request(fields: dict[str, Any], rules: dict[str, Any]) -> None:
    assert read(CompletionBody, GOOD[CompletionBody] | fields)[0].rules == rules


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias is .*, but it must be an object of numbers from -100 to 100"),
        ({"logit_bias": {"1": 101}}, "logit_bias is .*, but it must be an object"),
        ({"logit_bias": {"07": 1, "7": 2}}, "logit_bias is .*, as 7 and not 07"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3, but it must be less than or equal to 2"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is .*, but it must be a list of ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, but the longest answer is 8"),
        ({"reasoning_effort": "high"}, "reasoning_effort is not served"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\.0\.content is missing or null"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            r"messages\.0\.tool_calls\.0\.id is missing",
        ),
    ],
)
def test_values_that_break_a_rule_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    _, refusal = read(ChatBody, GOOD[ChatBody] | fields)
    assert refusal is not None
    assert re.search(message, str(refusal))


ALL_GOOD: dict[Any, dict[str, Any]] = GOOD | {
    ResponsesBody: {"model": "m", "input": "x"},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
}


@pytest.mark.parametrize("kind", ALL_GOOD)
def test_true_is_no_number_a_number_no_flag_and_a_text_neither(kind: Any) -> None:
    """In fields that are served, and in neutral values of those that are not, where Python's 1 == True."""
    for name, field in kind.model_fields.items():
        if field.annotation in (int | None, float | None, bool | None):
            flag = field.annotation == bool | None
            odd = [0, 1, 1.0, "true", [True]] if flag else [True, False, "1", [1]]
            for value in odd + [1.0] * (field.annotation == int | None):
                assert read(kind, ALL_GOOD[kind] | {name: value})[1] is not None, (name, value)
    for name, values in kind.neutral.items():
        for value in values:
            assert read(kind, ALL_GOOD[kind] | {name: value})[1] is None, (name, value)
            if isinstance(value, int | float):
                twin = int(value) if isinstance(value, bool) else bool(value)
                refusal = read(kind, ALL_GOOD[kind] | {name: twin})[1]
                assert str(refusal).startswith(f"{name} is {twin!r}, but {name} is not served"), (name, twin)
    for name in StructuredOutputs.model_fields:
        refusal = read(ChatBody, GOOD[ChatBody] | {"structured_outputs": {name: 0}})[1]
        assert refusal is not None, name


VLLMS_SHARED: dict[str, Any] = dict.fromkeys(  # defaults of vLLM's fields; null where they are null
    (
        *("add_special_tokens", "allowed_token_ids", "cache_salt", "ec_transfer_params", "frequency_penalty"),
        *("kv_transfer_params", "logit_bias", "logprob_token_ids", "min_p", "presence_penalty", "prompt_logprobs"),
        *("repetition_detection", "repetition_penalty", "response_format", "return_token_ids"),
        *("return_tokens_as_token_ids", "seed", "session_id", "stream_interval", "stream_options"),
        *("structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens"),
        *("truncation_side", "user", "vllm_xargs", "watermarking"),
    )
) | {
    "bad_words": [],
    "echo": False,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "n": 1,
    "priority": 0,
    "request_id": "a",
    "return_mm_kwargs": True,
    "return_token_offsets": False,
    "routed_experts_prompt_start": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "use_beam_search": False,
}
VLLMS_DEFAULTS: dict[Any, dict[str, Any]] = {
    CompletionBody: VLLMS_SHARED
    | {"add_special_tokens": True, "logprobs": None, "max_tokens": 16, "prompt_embeds": None, "suffix": None},
    ChatBody: VLLMS_SHARED
    | dict.fromkeys(
        (
            *("chat_template", "chat_template_kwargs", "documents", "max_completion_tokens", "max_tokens"),
            *("media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "return_prompt_text"),
        )
    )
    | {
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "include_reasoning": True,
        "logprobs": False,
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "strict": None, "defer_loading": None},
                "defer_loading": False,
            }
        ],
        "top_logprobs": 0,
    },
    ResponsesBody: dict.fromkeys(
        (
            *("cache_salt", "include", "instructions", "logit_bias", "max_output_tokens", "max_tool_calls"),
            *("metadata", "mm_processor_kwargs", "previous_input_messages", "previous_response"),
            *("previous_response_id", "prompt", "prompt_cache_key", "reasoning", "repetition_penalty", "seed"),
            *("structured_outputs", "temperature", "text", "top_k", "top_p", "user", "vllm_xargs"),
        )
    )
    | {
        "background": False,
        "enable_response_messages": False,
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "parallel_tool_calls": True,
        "priority": 0,
        "request_id": "resp_a",
        "service_tier": "auto",
        "skip_special_tokens": True,
        "stop": [],
        "store": True,
        "stream": False,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    },
}


@pytest.mark.parametrize("kind", VLLMS_DEFAULTS)
def test_a_body_of_all_of_vllms_defaults_is_taken(kind: Any) -> None:
    """As programs send it that dump vLLM's own classes."""
    assert read(kind, ALL_GOOD[kind] | VLLMS_DEFAULTS[kind])[1] is None
    refusal = read(kind, ALL_GOOD[kind] | {"priority": 1})[1]
    assert refusal is not None
    assert refusal.code == "unsupported"


VLLMS_TOKENIZE = {  # its defaults
    "model": "m",
    "add_generation_prompt": True,
    "return_token_strs": False,
    "continue_final_message": False,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "tools": None,
}


def test_vllms_defaults_of_tokenize_are_taken_and_no_other_values() -> None:
    chat = {"messages": GOOD[ChatBody]["messages"]}
    assert read(TokenizeBody, chat | VLLMS_TOKENIZE)[1] is None
    assert read(TokenizeBody, {"prompt": "x", "add_special_tokens": True})[1] is None
    assert read(DetokenizeBody, {"tokens": [1], "skip_special_tokens": True})[1] is None
    for kind, fields in (
        (TokenizeBody, chat | {"add_special_tokens": True}),
        (TokenizeBody, chat | {"add_generation_prompt": False}),
        (TokenizeBody, chat | {"continue_final_message": True}),
        (TokenizeBody, chat | {"chat_template": "{{ messages }}"}),
        (TokenizeBody, {"prompt": "x", "add_special_tokens": False}),
        (DetokenizeBody, {"tokens": [1], "skip_special_tokens": False}),
    ):
        refusal = read(kind, fields)[1]
        assert refusal is not None
        assert (refusal.param, refusal.code) == (list(fields)[-1], "unsupported")


def test_logprobs_of_chats() -> None:
    assert read(ChatBody, GOOD[ChatBody] | {"logprobs": True})[0].num_logprobs == 0
    for options in ({"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}):
        _, refusal = read(ChatBody, GOOD[ChatBody] | options)
        assert refusal is not None
        assert (refusal.param, "give both or neither" in str(refusal)) == ("top_logprobs", True)
