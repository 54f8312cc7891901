"""Tools for tests and benchmarks of distributed programs, in any project; the library itself imports none of them."""
