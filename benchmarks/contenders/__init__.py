"""Peers and laconic on the same model and the same data: what `python -m benchmarks.run side-by-side` measures."""
