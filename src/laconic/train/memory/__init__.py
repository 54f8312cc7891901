"""Memory of a run: whether it fits, predictions, measurements."""
