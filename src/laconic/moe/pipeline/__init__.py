"""A layer in chunks on streams, forward and backward apart, with gradients reduced in between."""
