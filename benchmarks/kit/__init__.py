"""What several benchmarks measure with: times, models, tensors of a training, calls, peers."""
