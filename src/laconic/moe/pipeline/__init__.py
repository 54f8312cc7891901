"""Chunked layers: schedules on streams, forward and backward apart, with gradient reductions in between."""
