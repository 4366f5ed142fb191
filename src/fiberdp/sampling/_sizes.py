"""The two public numbers of every sampler, checked once for all of them."""

from __future__ import annotations

from fiberdp._validate import count


def check(num_examples: int, batch_size: int) -> None:
    """Refuse, with ValueError, sizes that are no whole numbers or a batch larger than the data set."""
    count("num_examples", num_examples, why="It is N, the public size of the data set.")
    count("batch_size", batch_size, why="It is B, the expected batch size and the divisor of every step.")
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size={batch_size}: must be at most num_examples={num_examples}. The inclusion probability B/N "
            "would exceed 1. Use a batch_size up to num_examples; at num_examples every step is full batch."
        )
