"""FSDP2, DDP, pipeline stages and autograd over a codec."""
