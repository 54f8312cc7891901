"""What an answer must be, as clients say it: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.infer.server.conversation import Strict, check_false


def check_kind(kind: str, schema: object) -> None:
    """Refuse a schema beside a type that would not follow it, as a validator of both."""
    if kind != "json_schema" and schema is not None:
        raise ValueError(f"must have type 'json_schema' and not {kind!r} beside a schema")


class _JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must be: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ResponseFormat:
        check_kind(self.type, self.json_schema)
        return self


class StructuredOutputs(Strict):
    """What an answer must be, as vLLM has it: a JSON schema or object, what a regular expression takes, or a text.

    Or what a grammar in Lark's format takes. One of these is given; what else vLLM has is false or null.
    """

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Annotated[None, BeforeValidator(check_false)] = None
    disable_additional_properties: Annotated[None, BeforeValidator(check_false)] = None
    disable_fallback: Annotated[None, BeforeValidator(check_false)] = None
    structural_tag: Annotated[None, BeforeValidator(check_false)] = None
    whitespace_pattern: Annotated[None, BeforeValidator(check_false)] = None
