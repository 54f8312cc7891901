"""Which way a message takes, the same on all ranks: measuring, predicting, learning."""
