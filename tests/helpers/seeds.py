"""Seeds all generators that tests and the processes that they start draw from."""

import os
import random

import numpy as np


VARIABLE = "PYTEST_SEED"  # in the environment of processes that tests start


def seed_everything(number: int) -> None:
    """Seeds the generators of Python, NumPy and torch, and those of the processes that are started from now on."""
    import torch  # not in the process that hands out tests

    os.environ[VARIABLE] = str(number)
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed keeps a traceback too, for each kind of device
