"""Choice of a message's codec, the same on all ranks: measured rates, a cost model, running estimates."""
