"""Tasks of the trainer: what a sample is, the loss of a batch, and what an evaluation counts."""
