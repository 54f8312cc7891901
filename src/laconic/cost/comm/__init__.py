"""Cost of collectives: rates of links and codecs, seconds of an operation raw and coded, and the faster of the two."""
