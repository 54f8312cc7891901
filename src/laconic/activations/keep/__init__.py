"""What stands in for a tensor between forward and backward: codes, bits, host memory, and how it is checked."""
