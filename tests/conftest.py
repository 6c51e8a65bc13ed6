"""What every test runs under: one thread, and hypothesis without a clock."""

import os

import torch
from hypothesis import settings

# Sums split over threads round differently from run to run, and the workers of xdist would fight over the cores.
torch.set_num_threads(1)

# No deadline: the first example pays for torch's warm-up. In CI the same examples every time, so that a red run is red
# for everybody; elsewhere new ones, so that they go on searching.
settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
