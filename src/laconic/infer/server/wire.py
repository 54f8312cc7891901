"""HTTP around the routes: refusals, the key, counts of answers, bodies and events of clients that may go away."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from laconic.infer.server.settings import ServerSettings

_T = TypeVar("_T")


class Refusal(Exception):
    """A request that is answered with an error: the status of HTTP, and a message with field, value, rule and remedy.

    `param` is the field that is wrong, `code` a word for programs, if there are such.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        status: int = 400,
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


class RequireKey:
    """Lets only requests with the key through, and those for /health and /ready."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._digest = app, hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", "/ready") and not self._has_key(scope):
            refusal = Refusal(
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests have one length, so the comparison takes the same time for all keys.
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), self._digest)


class CountAnswers:
    """Counts answers by path and status; paths that are not served count as one."""

    def __init__(self, app: ASGIApp, answers: dict[tuple[str, int], int], paths: set[str]) -> None:
        self._app, self._answers, self._paths = app, answers, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                path = "/v1/models" if scope["path"].startswith("/v1/models/") else scope["path"]
                path = path if path in self._paths else "other"
                self._answers[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the body of a request.

    It is a Refusal if it is not JSON by its header, or packed (415), too long (413), or does not come in time (408).
    """
    max_bytes, seconds = settings.max_body_bytes, settings.max_body_seconds
    kind, *parameters = (each.strip().lower() for each in request.headers.get("content-type", "").split(";"))
    if kind != "application/json":  # pages of other sites can send anything else without asking the browser
        raise Refusal(f"Content-Type is {kind!r}, but it must be application/json", status=415)
    for name, _, value in (each.partition("=") for each in parameters):
        if name == "charset" and (charset := value.strip('"')) not in ("utf-8", "utf8", "us-ascii"):
            raise Refusal(f"Content-Type has charset {charset!r}, but JSON is read as utf-8; send it so", status=415)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refusal(f"Content-Encoding is {coding!r}, but no body is unpacked here; send it as it is", status=415)
    too_long = Refusal(f"the body has more than {max_bytes} bytes, which is the most that is read", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_bytes:
                    raise too_long
    except TimeoutError:
        # The rest of the body would be read as the next request.
        raise Refusal(
            f"the body has not arrived within {seconds} s; send it again", status=408, headers={"Connection": "close"}
        ) from None
    return bytes(content)


class EventStream(Response):
    """Sends events as they come, until there are no more or the client has gone, which `close` is told at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[bool], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False
        try:
            await unless_gone(receive, self._send(send))
        except (ClientDisconnect, OSError):
            gone = True
        finally:
            self._close(gone)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; if the client goes away before, cancel it and raise ClientDisconnect."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = [working, asyncio.ensure_future(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
