"""What a model is made of: sites found by what modules compute, and the plan of what to do at each."""
