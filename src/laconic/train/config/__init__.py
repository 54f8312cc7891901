"""Configuration of a run: its fields and their rules, TOML files, recipes, plans."""
