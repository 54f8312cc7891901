"""`laconic serve`: a model over HTTP, as OpenAI's clients expect it."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from laconic.cli.arguments import Parser, at_least
from laconic.cli.engine_flags import add_engine_flags, serve_if_not_first, start_engine
from laconic.errors import ConfigError

_KEY_VARIABLE = "LACONIC_API_KEY"


def run(args: Sequence[str]) -> int:
    """Run `laconic serve` with `args`."""
    options = make_parser().parse_args(args)
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the server needs {' and '.join(missing)}: pip install 'laconic[serve]'")
    api_key = _api_key(options.api_key_file)
    if api_key is None and not _is_loopback(options.host):
        raise ConfigError(
            f"--host is {options.host!r}, which other machines can reach, but there is no API key; give --api-key-file"
            f" FILE or the variable {_KEY_VARIABLE}"
        )
    serve_if_not_first(options)
    # The server drains at SIGTERM, then raises it again: the engine's workers are to be ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal; nohup has it ignored
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    listening = _listen(options.host, options.port)
    try:
        _serve(options, api_key, listening)
    finally:
        listening.close()
    return 0


def _serve(options: argparse.Namespace, api_key: str | None, listening: socket.socket) -> None:
    from laconic.infer.server import ServerSettings, create_app, load_text_tokenizer
    from laconic.infer.server.listening import ConnectionLimits, serve_http
    from laconic.infer.transformers_seam import check_transformers, read_config

    limits = ConnectionLimits(options.max_connections, options.max_connections_per_address, options.head_seconds)
    check_transformers()
    model_dir = Path(options.model)
    config = read_config(model_dir).get_text_config()
    tokenizer = load_text_tokenizer(model_dir)
    settings = ServerSettings(
        model_name=options.name or model_dir.resolve().name,
        api_key=api_key,
        max_model_tokens=getattr(config, "max_position_embeddings", None),
        max_waiting=options.max_waiting,
        default_max_tokens=options.default_max_tokens,
        tool_call_parser=options.tool_call_parser,
        allowed_origins=tuple(options.allowed_origins),
    )
    with start_engine(options) as engine:
        app = create_app(engine, tokenizer, settings)
        address = listening.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        print(f"{engine}\n{settings.model_name} is served at http://{host}:{address[1]}/v1", flush=True)
        serve_http(app, listening, limits, options.drain_seconds)


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic serve",
        description="Serve a Hugging Face model, its experts in processes of their own, as OpenAI's API does.",
    )
    add_engine_flags(parser)
    add = parser.add_argument_group("server").add_argument
    add("--name", help="what clients call the model (default: the directory's name)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen at; 0 takes a free one (default: 8000)")
    add(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the key that clients must send (default: the variable {_KEY_VARIABLE}, if it is set)",
    )
    add("--max-waiting", type=int, default=128, metavar="N", help="requests that wait for room; more get 429")
    add(
        "--default-max-tokens",
        type=int,
        metavar="N",
        help="most tokens of a chat's answer whose request does not say (default: the model's, or all that fit)",
    )
    add("--tool-call-parser", choices=["hermes", "llama3_json", "mistral"],
        help="how the model writes calls of tools (default: by its chat template)")  # fmt: skip
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN",
        help="pages whose scripts may ask, such as https://a.example; '*' is all (default: none)")  # fmt: skip
    add("--max-connections", type=int, metavar="N",
        help="connections at once (default: 1024, or fewer as `ulimit -n` allows)")  # fmt: skip
    add("--max-connections-per-address", type=int, metavar="N",
        help="connections of one client's address at once (default: three quarters of all)")  # fmt: skip
    add("--head-seconds", type=int, default=10, metavar="S", help="for a request's head to arrive (default: 10)")
    add(
        "--drain-seconds", type=at_least(0), default=30, metavar="S", help="for requests to end at a stop (default: 30)"
    )
    return parser


def _api_key(file: str | None) -> str | None:
    if file is None:
        return os.environ.get(_KEY_VARIABLE)
    key = Path(file).read_text(encoding="utf-8", errors="replace").strip()
    if not key:
        raise ConfigError(f"--api-key-file is {file!r}, which is empty; write a key into it")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    """Take the port, before a model is loaded for it."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}, but it must be from 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except socket.gaierror as error:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port is {port}, but another process listens there; give another, or 0") from None
        raise ConfigError(f"cannot listen at {host!r}, port {port}: {error.strerror}") from None
