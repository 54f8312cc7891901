"""What backward runs: torch's own on rebuilt tensors, formulas of ours, and code that runs again."""
