"""Distribution: processes of a run, their stages and replicas, wrappers of the model, consistency and traffic."""
