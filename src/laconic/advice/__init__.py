"""`laconic.advise`: the ways to save activation memory, measured on a user's model and machine."""

from laconic.advice.advice import Advice, Row
from laconic.advice.link import Link, LinkRow
from laconic.advice.measure import advise

__all__ = ["advise", "Advice", "Link", "LinkRow", "Row"]
