"""Bodies that are read whole, and events that are sent as they come, of clients that may go away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from laconic.infer.server.refusals import Refusal
from laconic.infer.server.settings import ServerSettings

_T = TypeVar("_T")


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
