"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    """Small tensors gain nothing from two threads and lose much on a busy machine; a test that is about threads sets its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
