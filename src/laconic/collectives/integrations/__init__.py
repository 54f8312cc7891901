"""Integrations of the codecs: FSDP2, DDP, pipeline stages and autograd."""
