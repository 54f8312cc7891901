"""Cables of the lab: pairs of interfaces with a rate, a state (plugged in or cut) and byte counts.

Token buckets (tbf) at both ends limit each direction on its own, as on a full-duplex cable.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import dataclass

from laconic.errors import ConfigError

__all__ = ["Link", "Traffic", "bits_per_second_of", "run_tool"]

_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# What programs hand to a card at once, by Linux' default.
_LONGEST_PACKET_NBYTES = 65536
# tbf counts whole bytes per second; below this a connection does not get through its first handshake in time.
_SLOWEST_BITS_PER_SECOND = 8000.0


@dataclass(frozen=True)
class Traffic:
    """Bytes that a link's near end has sent and received so far, Ethernet and IP headers included."""

    sent_nbytes: int
    received_nbytes: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent_nbytes - before.sent_nbytes, self.received_nbytes - before.received_nbytes)


@dataclass(frozen=True)
class End:
    """One interface: its network namespace and its name there."""

    namespace: str
    device: str


class Link:
    """A cable between a host (or a node's switch), its near end, and the switch behind it, its far end.

    Attributes:
        name: "host 0", "node 0" and so on.
        near, far: the interfaces at both ends.
        bits_per_second: rate in each direction; None without a limit.
    """

    def __init__(self, name: str, near: End, far: End) -> None:
        self.name = name
        self.near = near
        self.far = far
        self.bits_per_second: float | None = None

    def limit(self, bits_per_second: float | None) -> None:
        """Set the rate in each direction, from now on; None removes the limit.

        Raises:
            ConfigError: the rate is not a finite number of at least 8000 bits per second.
        """
        if bits_per_second is not None:
            check_rate(f"the rate of {self.name}", bits_per_second)
        longest = _LONGEST_PACKET_NBYTES
        for end in (self.near, self.far):
            # After a pause, as much as the link carries in 1 ms may pass at once: a smaller burst costs rate when
            # timers are late, a larger one would let short messages through at no cost. As much as it carries in 50 ms
            # may queue; beyond that packets are lost.
            if bits_per_second is not None:
                burst = max(16 * 1024, int(bits_per_second / 8 * 0.001))
                longest = min(longest, int(burst * 0.9))  # the headers of all packets that it stands for count, too
                run_tool(
                    *("tc", "-n", end.namespace, "qdisc", "replace", "dev", end.device, "root", "tbf"),
                    *("rate", f"{int(bits_per_second)}bit", "burst", f"{burst}b", "latency", "50ms"),
                )
            elif self.bits_per_second is not None:
                run_tool("tc", "-n", end.namespace, "qdisc", "delete", "dev", end.device, "root")
            # tbf cuts what is longer than a burst into packets of 1,448 bytes. Cards do that in hardware; in software,
            # at 400 Mbit/s, it took two thirds of the core of a program that computes while it receives.
            run_tool(*("ip", "-n", end.namespace, "link", "set", "dev", end.device, "gso_max_size", f"{longest}"))
        self.bits_per_second = bits_per_second

    def cut(self) -> None:
        """Unplug the cable: queued packets are lost, and nothing passes until `join`."""
        run_tool("ip", "-n", self.far.namespace, "link", "set", self.far.device, "down")

    def join(self) -> None:
        """Plug the cable in again."""
        run_tool("ip", "-n", self.far.namespace, "link", "set", self.far.device, "up")

    def traffic(self) -> Traffic:
        """Read the bytes that have passed so far."""
        shown = run_tool("ip", "-n", self.near.namespace, "-s", "-j", "link", "show", "dev", self.near.device)
        counts = json.loads(shown)[0]["stats64"]
        return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])


def bits_per_second_of(text: str) -> float:
    """Read a rate such as "100mbit", "2.5gbit" or "1e9", in bits per second.

    Raises:
        ConfigError: `text` is not a rate of at least 8000 bits per second.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-z]*)", text.strip().lower())
    try:
        if found is None or found[2] not in _UNITS:
            raise ValueError
        value = float(found[1]) * _UNITS[found[2]]
    except ValueError:
        raise ConfigError(
            f"the rate is {text!r}, but it must be a number with one of the units kbit, mbit, gbit, as in 2.5gbit"
        ) from None
    check_rate("the rate", value)
    return value


def check_rate(name: str, bits_per_second: float) -> None:
    """Check that a link can have this rate; `name` is what the message calls it.

    Raises:
        ConfigError: the rate is not a finite number of at least 8000 bits per second.
    """
    if not (math.isfinite(bits_per_second) and bits_per_second >= _SLOWEST_BITS_PER_SECOND):
        raise ConfigError(
            f"{name} is {bits_per_second} bits per second, but it must be a number of at least"
            f" {_SLOWEST_BITS_PER_SECOND:.0f}; None leaves the link without a limit"
        )


def run_tool(*command: str) -> str:
    """Run `ip` or `tc` and return what it prints.

    Raises:
        RuntimeError: the program fails; with what it printed to standard error.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout
