"""Experts as modules, the grouped matrix products they run on, and parts of them on several ranks."""
