"""Ranks of a layer: who belongs together, differentiable collectives, gradients of replicas."""
