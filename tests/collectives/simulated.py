"""Rates that nobody measured."""

from __future__ import annotations

from laconic.cost.comm.rates import OPERATIONS, CodecRates, Line, LinkRates, WireRates


def made_up_rates(bytes_per_second: float = 125e6, coding_bytes_per_second: float = 8e9) -> WireRates:
    """Four ranks on a link of 1 Gbit/s, 0.2 ms a message."""
    line = Line(2e-4, 1 / bytes_per_second)
    coding = Line(2e-5, 1 / coding_bytes_per_second)
    link = LinkRates(4, dict.fromkeys(OPERATIONS, line), 2e-4, overlap=0.5)
    codes = {"window": CodecRates(coding, coding, coding, 1.43), "tiered": CodecRates(coding, coding, coding, 1.49)}
    return WireRates({"across": link}, dict.fromkeys(("bfloat16", "float16", "float32"), codes))
