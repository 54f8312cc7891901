"""Saving runs and going on from them: checkpoints, their manifests, zipped shards, export."""
