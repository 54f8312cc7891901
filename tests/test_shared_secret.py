"""Who may take part in a run: the shared secret of sockets and stores."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import ConfigError
from laconic.shared_secret import admit, enter, read_secret, seal, unseal

SECONDS = 30.0
MINE, OTHER = "correct horse battery staple", "another secret of 30 characters"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_SECRET", raising=False)
    monkeypatch.delenv("LACONIC_SECRET_FILE", raising=False)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    acceptor, connector = socket.socketpair()
    with acceptor, connector:
        yield acceptor, connector


def use(secret: str | None) -> None:
    if secret is None:
        os.environ.pop("LACONIC_SECRET", None)
    else:
        os.environ["LACONIC_SECRET"] = secret


class Acceptor(threading.Thread):
    """`admit` in a thread, which has read its secret when this is made."""

    def __init__(self, end: socket.socket, other_end: socket.socket, token: str = "t", purpose: str = "rows") -> None:
        super().__init__()
        self.believes: bool | None = None
        self._what = end, token, purpose
        self.start()
        other_end.settimeout(SECONDS)
        other_end.recv(1, socket.MSG_PEEK)

    def run(self) -> None:
        end, token, purpose = self._what
        self.believes = admit(end, token, purpose, SECONDS)
        if not self.believes:
            end.close()


@pytest.mark.parametrize("theirs", [None, MINE, OTHER])
@pytest.mark.parametrize("mine", [None, MINE, OTHER])
def test_ends_believe_each_other_just_if_they_share_the_secret(
    mine: str | None, theirs: str | None, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_SECRET", "")  # restored afterwards
    use(mine)
    acceptor = Acceptor(*ends)
    use(theirs)
    if mine == theirs:
        enter(ends[1], "t", "rows", SECONDS)
        ends[1].sendall(b"what follows")
        acceptor.join(SECONDS)
        assert ends[0].recv(100) == b"what follows"
    else:
        with pytest.raises(
            ConfigError, match=r"listens for rows has another shared secret .* set the same LACONIC_SECR"
        ):
            enter(ends[1], "t", "rows", SECONDS)
        acceptor.join(SECONDS)
    assert acceptor.believes is (mine == theirs)


@pytest.mark.parametrize(("token", "purpose"), [("u", "rows"), ("t", "requests")])
def test_another_token_or_purpose_is_refused(
    token: str, purpose: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    acceptor = Acceptor(*ends)
    with pytest.raises(ConfigError, match=f"listens for {purpose} has another"):
        enter(ends[1], token, purpose, SECONDS)
    acceptor.join(SECONDS)
    assert acceptor.believes is False


@given(noise=st.binary(max_size=100))
def test_noise_is_no_proof(noise: bytes) -> None:
    acceptor_end, connector_end = socket.socketpair()
    with acceptor_end, connector_end:
        acceptor = Acceptor(acceptor_end, connector_end)
        connector_end.sendall(noise)
        connector_end.shutdown(socket.SHUT_WR)
        acceptor.join(SECONDS)
        assert acceptor.believes is False


def test_what_was_recorded_cannot_be_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_SECRET", MINE)
    proofs = []
    for attempt in range(2):
        acceptor_end, connector_end = socket.socketpair()
        with acceptor_end, connector_end:
            acceptor = Acceptor(acceptor_end, connector_end)
            if attempt == 0:
                # The connector's 48 bytes, as somebody on its way sees them.
                thread = threading.Thread(target=_relay_proof, args=(connector_end, proofs))
                thread.start()
                thread.join(SECONDS)
            else:
                connector_end.sendall(proofs[0])
            acceptor.join(SECONDS)
            assert acceptor.believes is (attempt == 0)


def _relay_proof(connector_end: socket.socket, proofs: list[bytes]) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(connector_end.recv(16, socket.MSG_WAITALL))
        thread = threading.Thread(target=enter, args=(near, "t", "rows", SECONDS))
        thread.start()
        proofs.append(far.recv(48, socket.MSG_WAITALL))
        connector_end.sendall(proofs[0])
        far.sendall(connector_end.recv(32, socket.MSG_WAITALL))
        thread.join(SECONDS)


def test_an_acceptor_that_says_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        enter(ends[1], "t", "rows", 0.05)
    assert admit(ends[0], "t", "rows", 0.05) is False


@given(key=st.text(max_size=20), value=st.text(st.characters(exclude_categories=["Cs"])), is_sealed=st.booleans())
def test_values_of_the_store_come_back(key: str, value: str, is_sealed: bool) -> None:
    before = os.environ.get("LACONIC_SECRET")
    use(MINE if is_sealed else None)
    try:
        sealed = seal(key, value)
        if is_sealed or not value.startswith("laconic-hmac:"):
            assert unseal(key, sealed.encode()) == value
        if is_sealed:
            for forged in (sealed.encode() + b"x", value.encode(), sealed.replace(":", ":0", 1).encode()):
                with pytest.raises(ConfigError, match="was written by a process"):
                    unseal(key, forged)
            with pytest.raises(ConfigError, match="does not know this one's shared secret"):
                unseal(key + "x", sealed.encode())
            use(None)
            with pytest.raises(ConfigError, match="has a shared secret, and this one has none; set LACONIC_SECRET"):
                unseal(key, sealed.encode())
        else:
            assert sealed == value
    finally:
        use(before)


def test_where_the_secret_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_secret() is None
    path = tmp_path / "secret"
    monkeypatch.setenv("LACONIC_SECRET_FILE", str(path))
    with pytest.raises(ConfigError, match=r"LACONIC_SECRET_FILE is '.*secret', which cannot be read \(No such file"):
        read_secret()
    path.write_text(MINE + "\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"with permissions 640; only its owner may have access: chmod 600"):
        read_secret()
    path.chmod(0o600)
    assert read_secret() == MINE.encode()
    monkeypatch.setenv("LACONIC_SECRET", MINE)
    with pytest.raises(ConfigError, match="are both set; unset one"):
        read_secret()
    monkeypatch.delenv("LACONIC_SECRET_FILE")
    monkeypatch.setenv("LACONIC_SECRET", "too short")
    with pytest.raises(ConfigError, match="LACONIC_SECRET holds 9 bytes; a shared secret has at least 16"):
        read_secret()
