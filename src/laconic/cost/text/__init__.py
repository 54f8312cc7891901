"""Sizes, plans and predictions as text and pictures."""
