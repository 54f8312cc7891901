"""Settings of the server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.infer.server.tool_calls import PARSERS


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        model_name: what clients call the model.
        api_key: that every request but /health and /ready must carry as a bearer token; None lets everybody in.
        max_model_tokens: tokens of prompt and answer that the model was made for; None leaves the engine's limit.
        max_waiting: requests that wait for room in the cache; one more is refused with 429.
        retry_after_seconds: what a refused client is told to wait.
        max_body_bytes: of a request; a longer one is refused with 413.
        max_body_seconds: for a body to arrive; one that takes longer is refused with 408.
        max_unread_tokens: of one request that its client has not taken; one more cancels the request.
        default_max_tokens: most tokens of an answer in a chat for which the client gives none; None takes those of the
            model's generation_config.json, or all that the model has positions for.
        tool_call_parser: how the model writes calls of tools: "hermes", "llama3_json" or "mistral"; None reads it off
            the model's chat template.
        allowed_origins: of pages whose scripts may ask (CORS), such as "https://a.example"; "*" is all.

    Raises:
        ConfigError: a value breaks its rule.
    """

    model_name: str
    api_key: str | None = None
    max_model_tokens: int | None = None
    max_waiting: int = 128
    retry_after_seconds: int = 1
    max_body_bytes: int = 1 << 20
    max_body_seconds: int = 60
    max_unread_tokens: int = 1024
    default_max_tokens: int | None = None
    tool_call_parser: str | None = None
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("model_name is empty, but clients must name the model; give it a name")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key must be of printable ASCII characters and not empty; None lets everybody in")
        if self.max_model_tokens is not None:
            self._check_least("max_model_tokens", 2)
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            raise ConfigError(
                f"tool_call_parser is {self.tool_call_parser!r}, but it must be one of {', '.join(PARSERS)}"
            )
        if not isinstance(self.allowed_origins, (list, tuple)):
            raise ConfigError(f"allowed_origins is {self.allowed_origins!r}, but it must be a list of origins")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _is_origin(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}, which no browser sends; list each origin, without patterns, as"
                    " scheme://host, or scheme://host:port if the port is not the scheme's own, in small letters and"
                    " without a path; a host with other letters than ASCII in punycode (xn--...)"
                )
        self._check_least("max_waiting", 0)
        for name in (
            "retry_after_seconds",
            "max_body_bytes",
            "max_body_seconds",
            "max_unread_tokens",
            "default_max_tokens",
        ):
            if getattr(self, name) is not None:
                self._check_least(name, 1)

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least {least}")


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:]+\]|[a-z0-9!$&'()+,;=_~.-]+)(:(?P<port>[1-9][0-9]{0,4}))?"
)


def _is_origin(text: object) -> bool:
    """Return whether a browser may send a text as Origin: letter by letter, as it is compared."""
    found = _ORIGIN.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return False
    scheme, host, port = found["scheme"], found["host"], int(found["port"] or 0)
    if port > 65535 or (port and port == {"http": 80, "https": 443}.get(scheme)):
        return False
    if scheme not in ("http", "https") or not (host[0] == "[" or host.split(".")[-1].isdigit()):
        return True
    try:
        return str(ipaddress.ip_address(host.strip("[]"))) == host.strip("[]")  # browsers write one form of each
    except ValueError:
        return False
