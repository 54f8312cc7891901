"""Choice of the fastest configuration of every layer: measuring, pricing, running the best few."""
