"""Process groups of a layer and differentiable collectives over them."""
