"""An OpenAI-compatible server over an engine, as an ASGI application.

app.py          routes and errors; conversations by the model's chat template
bodies.py       fields of requests and their rules; conversation.py: messages, tools and formats; unserved.py: fields
                that are not served, and their values that ask for nothing
responses.py    conversations by /v1/responses; tool_calls.py: calls in an answer's text
structure.py    formats of answers, as grammars
answers.py      one answer: admitted, then generation.py and text.py, then replies.py
wire.py, listening.py  refusals, keys, bodies and events of clients that may go away, and their connections
"""

from __future__ import annotations

from laconic.infer.server.app import create_app
from laconic.infer.server.settings import ServerSettings
from laconic.infer.token_engine import TokenEngine, TokenHandle, TokenListener
from laconic.infer.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer, load_text_tokenizer

__all__ = [
    "create_app",
    "ServerSettings",
    "TokenEngine",
    "TokenHandle",
    "TokenListener",
    "TextTokenizer",
    "HuggingFaceTokenizer",
    "ByteTokenizer",
    "load_text_tokenizer",
]
