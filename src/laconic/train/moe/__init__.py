"""Layers of experts in a run: making them, balancing routers, moving experts, what metrics say."""
