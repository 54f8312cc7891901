"""Cost of computing: measured rates of machines and codecs, seconds of a step."""
