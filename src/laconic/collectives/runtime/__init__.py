"""What collectives run in: a background executor per group, torch's operations under one set of names, who was lost."""
