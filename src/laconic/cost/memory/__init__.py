"""Bytes of a run on every rank: what models are, what they keep, and when a rank is fullest."""
