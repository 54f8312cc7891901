"""Memory of a run: whether it fits, what was predicted, what was measured."""
