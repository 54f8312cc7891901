"""The reference trainer: configuration, data, distribution, steps, checkpoints and reports of a run."""
