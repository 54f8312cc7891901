"""Runtime of collectives: background executors, torch's operations under one set of names, failure diagnosis."""
