"""The first hour on a GPU: eight parts in order of worth, run by tools/gpu_day.py, one process each.

`parts.py` lists them. Each has a module of its own, whose `run` reports tables as they are known. `record.py` is how
a part tells the driver, `journal.py` what the driver keeps, `page.py` the result, `predictions.py` what was
predicted, `preflight.py` what is missing; the driver needs no torch.
"""
