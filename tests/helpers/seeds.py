"""Seed all random generators of tests and of the processes that tests start."""

import os
import random

import numpy as np


VARIABLE = "PYTEST_SEED"  # Environment variable that passes the seed to processes started by tests


def seed_everything(number: int) -> None:
    """Seed the generators of Python, NumPy and torch, also in processes started later."""
    import torch  # a late import, because the process that distributes tests does not need torch

    os.environ[VARIABLE] = str(number)
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would also store tracebacks
