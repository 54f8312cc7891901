"""Collectives: how fast links and codecs are, what an operation takes raw and coded, and which of the two pays."""
