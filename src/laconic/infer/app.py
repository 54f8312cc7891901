"""The application that environment variables describe, for servers that build it themselves."""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import AsyncIterator, Callable, Container
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import from_json
from starlette.applications import Starlette

from laconic.errors import ConfigError
from laconic.infer.engine import Engine
from laconic.infer.server import ServerSettings, create_app, load_text_tokenizer
from laconic.infer.transformers_seam import check_transformers, read_config
from laconic.json_text import parse_json
from laconic.schedule.inference import InferencePlan

_STRICT = ConfigDict(extra="forbid", strict=True)


def _arguments_of(taker: Callable[..., object], left_out: Container[str], **others: Any) -> type[BaseModel]:
    """A model of what `taker` takes, with strings for words and paths, which it checks itself; null leaves one out."""
    kinds = {name: (hint, *get_args(hint)) for name, hint in get_type_hints(taker).items() if name not in left_out}
    fields = {name: next((one for one in (bool, int, float) if one in kind), str) for name, kind in kinds.items()}
    optional: dict[str, Any] = {name: (kind | None, None) for name, kind in (fields | others).items()}
    return create_model(taker.__qualname__, __config__=_STRICT, **optional)


_Plan: Any = _arguments_of(InferencePlan, ())
_EngineArguments = _arguments_of(
    Engine.__init__, ("model_dir", "launcher", "trace", "return"), plan=_Plan | Literal["auto"]
)
_ServerArguments = _arguments_of(ServerSettings, ("api_key",), allowed_origins=list[str])


def create_app_from_env() -> Starlette:
    """Start the engine that environment variables describe, and return the application that serves it.

    The engine ends with the application's lifespan, at the latest with the process. The variables:

    - `LACONIC_MODEL`: directory of the model.
    - `LACONIC_ENGINE`: a JSON object with arguments of `Engine`, `plan` "auto" or an object with those of
      `InferencePlan`; what is left out has its default.
    - `LACONIC_SERVER`: a JSON object with fields of `ServerSettings`. `model_name` is the directory's name by default,
      `max_model_tokens` what the model was made for.
    - `LACONIC_API_KEY`: the key that clients must send; without it everybody is let in.

    Raises:
        ConfigError: a variable is missing, no JSON object, or has a field that is unknown or breaks its rule.
        ModelError: the directory holds no model that can be served.
    """
    directory = os.environ.get("LACONIC_MODEL")
    if not directory:
        raise ConfigError("LACONIC_MODEL is not set; set it to the directory of a model")
    engine_arguments = _read("LACONIC_ENGINE", _EngineArguments)
    server_arguments = _read("LACONIC_SERVER", _ServerArguments)
    if isinstance(plan := engine_arguments.get("plan"), dict):
        engine_arguments["plan"] = InferencePlan(**plan)
    check_transformers()
    config = read_config(Path(directory)).get_text_config()
    made_for = getattr(config, "max_position_embeddings", None)
    defaults: dict[str, Any] = {"model_name": Path(directory).resolve().name, "max_model_tokens": made_for}
    settings = ServerSettings(**defaults | server_arguments, api_key=os.environ.get("LACONIC_API_KEY"))
    tokenizer = load_text_tokenizer(directory)
    engine = Engine(directory, **engine_arguments)
    builder = os.getpid()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if os.getpid() != builder:
            raise ConfigError(
                f"the application was built by process {builder} and is served by {os.getpid()}, which has no engine;"
                " let the serving process build it (gunicorn: without --preload)"
            )
        with engine:
            yield

    return create_app(engine, tokenizer, settings, lifespan)


def _read(variable: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Read a variable that holds a JSON object; returns the fields that it names."""
    text = os.environ.get(variable, "{}")
    try:
        values: Any = from_json(text, allow_inf_nan=False)
        parse_json(text)  # of two equal names the first would be dropped
    except ValueError as error:
        raise ConfigError(f"{variable} is {reprlib.repr(text)}, but it must be a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{variable} is {reprlib.repr(text)}, but it must be a JSON object")
    try:
        return kind.model_validate(values).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"] if part != _Plan.__name__)  # pydantic's mark of a union
        if first["type"] == "extra_forbidden":
            known = _Plan if name.startswith("plan.") else kind
            raise ConfigError(f"{variable} has {name}, but fields are {', '.join(known.model_fields)}") from None
        rule = first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"{variable}: {name} is {first['input']!r}, but it must be {rule}") from None
