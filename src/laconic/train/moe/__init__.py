"""Mixture-of-experts in a run: expert parallel layers, router balance, expert migration, metrics."""
