"""Processes of a run: who they are, how they wrap the model, what they agree on and send."""
