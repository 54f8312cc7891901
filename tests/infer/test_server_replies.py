"""Events of streams: those that are cut from others are what the general way makes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from laconic.infer.sampling import ChosenToken
from laconic.infer.server.generation import Part
from laconic.infer.server.replies import ChatReply, CompletionReply
from laconic.infer.tokenizer import ByteTokenizer

TOKENS = st.builds(ChosenToken, st.integers(0, 255), st.just(-1.0), st.just(((65, -1.0), (66, -2.0))))
PARTS = st.builds(
    Part,
    index=st.integers(0, 3),
    text=st.text(max_size=8) | st.sampled_from(["", '"', "\\", "\n\n", "\u2028", "data: [DONE]\n\n", "\U0001f600"]),
    token=st.none() | TOKENS,
    offset=st.integers(0, 99),
    finish_reason=st.sampled_from([None, None, None, "stop", "length"]),
)


@given(
    kind=st.sampled_from([CompletionReply, ChatReply]),
    model=st.text(min_size=1, max_size=8),
    with_logprobs=st.booleans(),
    parts=st.lists(PARTS, max_size=12),
)
def test_events_of_parts_are_those_of_their_chunks(
    kind: type[CompletionReply | ChatReply], model: str, with_logprobs: bool, parts: list[Part]
) -> None:
    reply = kind(model, ByteTokenizer(), with_logprobs)
    for part in parts:
        chunks = list(reply.chunks(part))
        events = reply.events(part)
        assert events == b"".join(reply.frame(chunk) for chunk in chunks)
        carried = [event.removeprefix(b"data: ") for event in events.split(b"\n\n")[:-1]]
        assert [json.loads(each) for each in carried] == chunks
