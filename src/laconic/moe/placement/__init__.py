"""Placement of experts: the map, migration, and the decision when to migrate."""
