"""An OpenAI-compatible server over an engine, as an ASGI application."""

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
