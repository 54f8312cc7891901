"""`python -m netlab`: run a command on every host of a small network with slow links.

    python -m netlab --hosts 4 --rate 1gbit -- python train.py
    python -m netlab --hosts 4 --nodes 2 --rate 1gbit --node-rate 10gbit -- laconic train

The command gets the variables that torchrun sets. Its lines are printed as they come, with the rank in front; the last
lines are the bytes that passed every link. Exit code: that of the first rank that failed, 0 when none did, 2 for bad
input, 3 when no lab can be built here.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence

from laconic.errors import ConfigError
from netlab.lab import Lab, why_not
from netlab.link import Traffic, bits_per_second_of
from netlab.program import Program

# Time for the other ranks to end by themselves after one has failed: their own errors say more than a kill.
_GRACE_SECONDS = 15.0
_CALIBRATION_SECONDS = 2.0

_print_lock = threading.Lock()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (None: the process's own) and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    chosen = _parser().parse_args(given[:place])
    command = given[place + 1 :]
    try:
        if not command and not chosen.calibrate:
            raise ConfigError("there is no command to run; put it after --, or ask for --calibrate alone")
        lab = Lab(
            chosen.hosts,
            None if chosen.rate is None else bits_per_second_of(chosen.rate),
            num_nodes=chosen.nodes,
            node_bits_per_second=None if chosen.node_rate is None else bits_per_second_of(chosen.node_rate),
        )
    except ConfigError as error:
        print(f"netlab: error: {error}", file=sys.stderr)
        return 2
    reason = why_not()
    if reason is not None:
        print(f"netlab: no lab can be built here: {reason}", file=sys.stderr)
        return 3
    try:
        with lab:
            return _run(lab, command, chosen)
    except KeyboardInterrupt:
        print("netlab: interrupted", file=sys.stderr)
        return 130


def _run(lab: Lab, command: Sequence[str], chosen: argparse.Namespace) -> int:
    if chosen.calibrate:
        _calibrate(lab)
    if not command:
        return 0
    before = lab.traffic()
    started = time.monotonic()
    programs = lab.start_ranks(command, ranks_per_host=chosen.ranks_per_host, port=chosen.port, on_line=_show)
    code = _watch(programs, chosen.timeout_seconds)
    seconds = time.monotonic() - started
    _report({name: now - before[name] for name, now in lab.traffic().items()}, seconds)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m netlab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND ...",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default: 2)")
    parser.add_argument("--rate", help="each way, of every host's link, or of every node's uplink: 100mbit, 2.5gbit")
    parser.add_argument("--nodes", type=int, help="put the hosts in this many nodes")
    parser.add_argument("--node-rate", help="of the links inside of nodes (default: no limit)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (default: 1)")
    parser.add_argument("--port", type=int, default=29500, help="MASTER_PORT (default: 29500)")
    parser.add_argument("--calibrate", action="store_true", help="first measure what one TCP connection gets")
    parser.add_argument("--timeout-seconds", type=float, help="kill everything after this long")
    return parser


def _calibrate(lab: Lab) -> None:
    """Print the rate that one TCP connection gets, between hosts and between nodes."""
    pairs = {}
    if lab.num_hosts > 1:
        pairs["between the first two hosts"] = 1
    if lab.num_nodes is not None and lab.num_nodes > 1 and lab.node_of(1) == 0:
        pairs["between the first two nodes"] = lab.num_hosts // lab.num_nodes
    for where, host in pairs.items():
        across = lab.node_of(host) != lab.node_of(0)
        rate = lab.bits_per_second if across else lab.node_bits_per_second
        measured = lab.measured_bits_per_second(int((rate or 4e9) / 8 * _CALIBRATION_SECONDS), sender=host)
        share = "" if rate is None else f", {measured / rate:.1%} of the link's rate"
        print(f"netlab: one TCP connection {where} gets {measured / 1e6:.1f} Mbit/s{share}", file=sys.stderr)


def _show(program: Program, line: str) -> None:
    with _print_lock:
        print(f"[{program.name}] {line}", flush=True)


def _watch(programs: Sequence[Program], timeout_seconds: float | None) -> int:
    """Wait for all programs; those that still run some time after the first failure, or at the timeout, are killed.

    Returns:
        The exit code of the first that failed (128 + the signal's number when one killed it), 0 when none did, 124
        after the timeout.
    """
    first, deadline = 0, None if timeout_seconds is None else time.monotonic() + timeout_seconds
    running = list(programs)
    while running:
        for program in [program for program in running if program.code is not None]:
            running.remove(program)
            ending = program.wait(10)
            if ending.code:
                print(f"netlab: {program.name} ended with {ending.code}", file=sys.stderr)
            if ending.code and not first:
                first = ending.code if ending.code > 0 else 128 - ending.code
                soon = time.monotonic() + _GRACE_SECONDS
                deadline = soon if deadline is None else min(deadline, soon)
        if deadline is not None and time.monotonic() > deadline:
            for program in running:
                print(f"netlab: {program.name} was still running and is killed", file=sys.stderr)
                program.kill()
            return first or 124
        time.sleep(0.02)
    return first


def _report(traffic: dict[str, Traffic], seconds: float) -> None:
    width = max(map(len, traffic))
    print(f"netlab: {seconds:.2f} s; bytes on every link, headers included:", file=sys.stderr)
    for name, link in traffic.items():
        print(f"  {name:<{width}}  sent {link.sent_nbytes:>15,}  received {link.received_nbytes:>15,}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
