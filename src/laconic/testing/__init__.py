"""What tests and benchmarks of distributed programs need, here and in other projects; imported by nobody inside."""
