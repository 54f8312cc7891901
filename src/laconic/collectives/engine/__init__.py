"""One call of a collective: settings, chunks, messages, errors, and the background it may run in."""
