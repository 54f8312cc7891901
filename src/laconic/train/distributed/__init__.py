"""Distribution: processes of a run, their layout, wrappers of the model, consistency and traffic."""
