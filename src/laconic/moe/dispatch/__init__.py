"""Dispatchers: move rows to the ranks that hold their experts and outputs back, in one chunk or several."""
