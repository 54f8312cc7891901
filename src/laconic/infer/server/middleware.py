"""What every request passes before its route: the key, and the count of answers."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from laconic.infer.server.refusals import Refusal


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
