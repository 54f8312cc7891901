"""`laconic run`: an unmodified training script with the savings switched on.

script.py runs the file as Python would, savings.py converts models and optimizers on their way, zipped_groups.py makes
process groups laconic's, summary.py says what came of it.
"""
