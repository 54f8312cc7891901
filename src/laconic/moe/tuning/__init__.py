"""Choosing the fastest configuration of every layer: measuring, agreeing, watching for drift."""
