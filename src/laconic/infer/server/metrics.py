"""Counters of the server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of durations up to each of a few bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return the samples of the histogram `name`."""
        found, total = [], 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the server counts, for one event loop: answers by path and status, "prompt" and "completion" tokens.

    Requests that ended early are by reason, "disconnect" or "slow_client"; seconds are from a request's arrival to its
    first token, and to its end.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.first_token_seconds, self.request_seconds = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, int]) -> str:
        """Return everything counted, and the present values of `gauges`."""
        lines: list[str] = []

        def family(name: str, kind: str, help_text: str, samples: list[str]) -> None:
            lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *samples])

        family(
            "laconic_http_answers_total",
            "counter",
            "HTTP answers.",
            [
                f'laconic_http_answers_total{{path="{p}",status="{s}"}} {n}'
                for (p, s), n in sorted(self.answers.items())
            ],
        )
        for name, help_text, label, counter in (
            ("laconic_tokens_total", "Tokens read and made.", "kind", self.tokens),
            ("laconic_cancelled_total", "Requests that ended early.", "reason", self.cancelled),
        ):
            samples = [f'{name}{{{label}="{value}"}} {count}' for value, count in sorted(counter.items())]
            family(name, "counter", help_text, samples)
        for name, help_text, histogram in (
            ("laconic_first_token_seconds", "From arrival to the first token.", self.first_token_seconds),
            ("laconic_request_seconds", "From arrival to the end.", self.request_seconds),
        ):
            family(name, "histogram", help_text, histogram.lines(name))
        for name, value in gauges.items():
            family(f"laconic_{name}", "gauge", f"Now: {name.replace('_', ' ')}.", [f"laconic_{name} {value}"])
        return "\n".join(lines) + "\n"
