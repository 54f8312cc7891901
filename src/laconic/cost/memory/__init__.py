"""Memory of a run on every rank: persistent state, saved activations, and the peak."""
