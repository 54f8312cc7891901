"""What computing takes: measured rates of machines and codecs, seconds of a step."""
