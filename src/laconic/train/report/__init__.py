"""Reports of a run: run directories, metrics, tables, pages."""
