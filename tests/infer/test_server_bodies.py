"""Bodies of requests: whatever comes is read or refused, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.infer.sampling import Sampling
from laconic.infer.server.bodies import ChatBody, CompletionBody, parse_body
from laconic.infer.server.refusals import Refusal

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
        top_k=body.top_k or 0,
        seed=body.seed or 0,
        max_new_tokens=body.longest_answer or 1,
        logprobs=body.num_logprobs,
    )
    assert all(name in type(body).model_fields or not value for name, value in fields.items())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(st.binary(max_size=30))
def test_bytes_that_are_no_body_are_refused(kind: Any, content: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        parse_body(kind, content)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("content", "text"),
    [("one", "one"), ([{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}], "one"), ("", "")],
)
def test_contents_of_messages(content: Any, text: str) -> None:
    values = {"model": "m", "messages": [{"role": "user", "content": content, "name": "me"}]}
    message = parse_body(ChatBody, json.dumps(values).encode()).messages[0]
    assert (message.role, message.content, message.name) == ("user", text, "me")


@pytest.mark.parametrize("options", [{"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}, {"logprobs": True}])
def test_logprobs_of_chats(options: dict[str, Any]) -> None:
    content = json.dumps(GOOD[ChatBody] | options).encode()
    if "top_logprobs" in options:
        with pytest.raises(Refusal, match="give both or neither"):
            parse_body(ChatBody, content)
    else:
        assert parse_body(ChatBody, content).num_logprobs == 0
