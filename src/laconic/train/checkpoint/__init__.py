"""Checkpoints: saving, loading, manifests, zipped shards, export."""
