"""Starting the processes of a run, and what each of them does first."""
