"""Engine of one collective call: settings, chunks, messages and errors."""
