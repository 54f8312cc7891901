"""A secret that all processes of a run share: who does not know it cannot join them, nor write into their store.

Set LACONIC_SECRET_FILE (a file that only its owner can read) or LACONIC_SECRET on every machine. Then laconic's own
sockets admit a connection only after both ends have proved that they know it, and what laconic puts into the store of
torch.distributed carries a code (HMAC-SHA256, RFC 2104) of key and value. Nothing is encrypted, and what gloo and NCCL
send is theirs: the secret says who takes part, not who may listen.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import time

from laconic.errors import ConfigError

_VARIABLE, _FILE_VARIABLE = "LACONIC_SECRET", "LACONIC_SECRET_FILE"
_MIN_NBYTES = 16
_SEAL = "laconic-hmac:"
_NONCE_NBYTES, _CODE_NBYTES = 16, hashlib.sha256().digest_size


def read_secret() -> bytes | None:
    """Return the secret of this process's environment, None without one.

    Raises:
        ConfigError: both variables are set, the secret is shorter than 16 bytes, or the file cannot be read or can be
            read by others than its owner.
    """
    text, path = os.environ.get(_VARIABLE), os.environ.get(_FILE_VARIABLE)
    if path is None:
        return None if text is None else _long_enough(os.fsencode(text), _VARIABLE)
    if text is not None:
        raise ConfigError(f"{_VARIABLE} and {_FILE_VARIABLE} are both set; unset one of them")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read().strip()
    except OSError as error:
        raise ConfigError(f"{_FILE_VARIABLE} is {path!r}, which cannot be read ({error.strerror})") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{_FILE_VARIABLE} is {path!r}, with permissions {stat.S_IMODE(mode):o}; only its owner may have access:"
            f" chmod 600 {path}"
        )
    return _long_enough(found, f"the file of {_FILE_VARIABLE}")


def seal(key: str, value: str) -> str:
    """Return what to put into a store under `key`: `value`, with a code of both if there is a secret.

    Raises:
        ConfigError: see `read_secret`.
    """
    secret = read_secret()
    return value if secret is None else f"{_SEAL}{_code_of_value(secret, key, value)}:{value}"


def unseal(key: str, sealed: bytes) -> str:
    """Return the value that another process has sealed under `key`.

    Raises:
        ConfigError: its code is missing or wrong, or it has one and there is no secret here; see also `read_secret`.
    """
    secret, text = read_secret(), sealed.decode("utf-8", "backslashreplace")
    is_sealed = text.startswith(_SEAL)
    if secret is None and not is_sealed:
        return text
    where = f"{key!r} in the store was written by a process"
    if secret is None:
        raise ConfigError(f"{where} that has a shared secret, and this one has none; set {_VARIABLE} on all machines")
    if not is_sealed:
        raise ConfigError(f"{where} without a shared secret, and this one has one; set {_VARIABLE} on all machines")
    code, _, value = text.removeprefix(_SEAL).partition(":")
    if not hmac.compare_digest(code.encode(), _code_of_value(secret, key, value).encode()):
        raise ConfigError(
            f"{where} that does not know this one's shared secret, or was changed; set the same {_VARIABLE} on all"
            " machines, and keep strangers off their network"
        )
    return value


def admit(connected: socket.socket, token: str, purpose: str, seconds: float) -> bool:
    """Find out, at the accepting end, whether the other one knows token and secret, and prove that this one does.

    The acceptor sends a nonce A, the connector a nonce B and the code of (purpose, A, B), the acceptor the code of
    (purpose, B, A); the key is the HMAC of the token under the secret. Nothing that was recorded can be played again.

    Args:
        connected: by TCP; where the answer is False the caller closes it.
        token: of this run, which the store tells those who take part.
        purpose: what the connection is for; the other end must want the same.
        seconds: for the whole exchange.

    Raises:
        ConfigError: see `read_secret`.
    """
    key, deadline = _key(token), time.monotonic() + seconds
    mine = secrets.token_bytes(_NONCE_NBYTES)
    try:
        connected.sendall(mine)
        proof = _receive(connected, _NONCE_NBYTES + _CODE_NBYTES, deadline)
        theirs, code = proof[:_NONCE_NBYTES], proof[_NONCE_NBYTES:]
        if not hmac.compare_digest(code, _code(key, "connect", purpose, mine, theirs)):
            return False
        connected.sendall(_code(key, "accept", purpose, theirs, mine))
    except OSError:
        return False
    connected.settimeout(None)
    return True


def enter(connected: socket.socket, token: str, purpose: str, seconds: float) -> None:
    """Prove, at the connecting end, that this one knows token and secret, and find out whether the other one does.

    Args:
        connected, token, purpose, seconds: see `admit`.

    Raises:
        ConfigError: the other end has another secret or none, or is no process of this run; see also `read_secret`.
        OSError: it did not answer in time.
    """
    key, deadline = _key(token), time.monotonic() + seconds
    mine = secrets.token_bytes(_NONCE_NBYTES)
    theirs = _receive(connected, _NONCE_NBYTES, deadline)
    answer = b""
    with contextlib.suppress(ConnectionError):  # it closes on whom it does not believe
        connected.sendall(mine + _code(key, "connect", purpose, theirs, mine))
        answer = _receive(connected, _CODE_NBYTES, deadline)
    if not hmac.compare_digest(answer, _code(key, "accept", purpose, mine, theirs)):
        raise ConfigError(
            f"the process that listens for {purpose} has another shared secret than this one, or is none of this run;"
            f" set the same {_VARIABLE} on all machines"
        )
    connected.settimeout(None)


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _MIN_NBYTES:
        raise ConfigError(
            f"{where} holds {len(secret)} bytes; a shared secret has at least {_MIN_NBYTES}, for example those of"
            " `openssl rand -hex 32`"
        )
    return secret


def _key(token: str) -> bytes:
    return hmac.digest(read_secret() or b"", b"laconic connection " + token.encode(), "sha256")


def _code(key: bytes, role: str, purpose: str, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, f"{role} {purpose} ".encode() + first + second, "sha256")


def _code_of_value(secret: bytes, key: str, value: str) -> str:
    return hmac.digest(secret, f"laconic store {len(key)} {key} {value}".encode(), "sha256").hex()


def _receive(connected: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly `nbytes`, and not one of those that follow."""
    found = b""
    while len(found) < nbytes:
        connected.settimeout(max(0.01, deadline - time.monotonic()))
        if not (more := connected.recv(nbytes - len(found))):
            raise ConnectionResetError("the other end has closed the connection")
        found += more
    return found
