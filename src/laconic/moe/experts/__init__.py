"""Experts as modules, their grouped matrix products, and their shards on several ranks."""
