"""Measurements of inference: tokens per second and latency of engines that run different plans."""
