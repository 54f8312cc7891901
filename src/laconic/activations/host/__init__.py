"""What torch and hosts do around a layer: compilers, CUDA graphs, streams, shards, audits, forwards of their own."""
