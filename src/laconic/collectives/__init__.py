"""Collectives: torch's own under one set of names, background lanes, and collectives over a codec."""
