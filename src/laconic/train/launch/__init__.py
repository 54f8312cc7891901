"""Starts the processes of a run."""
