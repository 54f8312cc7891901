"""Pipeline parallel runs: cutting a model into stages, and running the schedule."""
