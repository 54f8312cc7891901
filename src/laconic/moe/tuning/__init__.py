"""Choice of the fastest configuration of every layer: measuring, predicting, running the best few."""
