"""Where experts live: the map, moving them, and deciding when that pays."""
