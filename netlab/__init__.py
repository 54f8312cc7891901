"""A network on one Linux machine: hosts in network namespaces, switches between them, links of a given rate.

    with Lab(4, 1e9) as lab:                        # four hosts, 1 Gbit/s each way
        endings = finish(lab.start_ranks([sys.executable, "train.py"]), timeout_seconds=60)
        print(lab.traffic())

    python -m netlab --hosts 4 --rate 1gbit -- python train.py

Hosts can be grouped in nodes, with fast links inside a node and slow ones between nodes. While a program runs, links
can be cut, joined and slowed down, and processes stopped and killed. docs/netlab.md documents all of it.
Tests and benchmarks use it; the wheel does not contain it.
"""

from netlab.lab import Lab, why_not
from netlab.link import Link, Traffic, bits_per_second_of
from netlab.program import Ending, Program, finish

__all__ = ["Ending", "Lab", "Link", "Program", "Traffic", "bits_per_second_of", "finish", "why_not"]
