"""Requests that are refused, as OpenAI's clients expect it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse


class Refusal(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: for the user: field, value, rule, remedy.
        param: field of the request that is wrong, if one is.
        code: word for programs, if there is one.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, object]:
        """Return the error as OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)
