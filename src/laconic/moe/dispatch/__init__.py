"""Rows to their experts and back: each dispatcher as a whole and in chunks, and what both plan with."""
