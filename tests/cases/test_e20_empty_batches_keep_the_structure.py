"""E20 (SAMP): rows that are dicts, nested tuples or transformers-like encodings, int64 ids and a string; the first batches are empty.

Right: an empty batch has the structure and dtypes of a full one, with length-0 tensors, and training continues.  N = 50, q = .01, so
P(empty) = .605; a plan's batch size is a whole number, so the sampler here is Poisson's with that q put in, and B = 1 divides.
Origin: CASES.md (opacus#534, #806).  Wrong: an exception from stacking nothing; float ids; a dict that became a list.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fiberdp
from fiberdp import _tree
from fiberdp.engines import ENGINES
from fiberdp.optim import Constant
from fiberdp.sampling import Poisson
from fiberdp.sampling.source import as_source

N, STEPS, C = 50, 4, 0.5
PLAIN = replace(fiberdp.method("dp-sgd", lr=1.0, momentum=0.0), schedule=Constant())  # theta_t - theta_{t+1} = g_t
IDS = torch.randint(0, 7, (N, 3), generator=torch.Generator().manual_seed(20))


@pytest.fixture(autouse=True)
def _short_receipt(monkeypatch):
    """4 steps instead of 64: the receipt has its own tests, and on a model this small it would take all the time."""
    monkeypatch.setattr("fiberdp.trainer.receipt_steps", lambda numel: 4)


class Rows:
    """A map-style data set."""

    def __init__(self, row) -> None:
        self.row = row

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int):
        if not 0 <= i < N:
            raise IndexError(i)
        return self.row(i)


def text(i):
    return "x" * (1 + i % 3)


# kind: (row, the field of ids in a batch, the field of labels, the field of strings)
KINDS = {
    "dict": (
        lambda i: {"ids": IDS[i], "text": text(i), "label": i % 2},
        lambda b: b["ids"],
        lambda b: b["label"],
        lambda b: b["text"],
    ),
    "nested tuple": (
        lambda i: ((IDS[i], text(i)), (i % 2, {"weight": 0.5})),
        lambda b: b[0][0],
        lambda b: b[1][0],
        lambda b: b[0][1],
    ),
    "encoding": (
        lambda i: UserDict(input_ids=IDS[i].tolist(), attention_mask=[1, 1, 0], text=text(i), labels=np.int64(i % 2)),
        lambda b: b["input_ids"],
        lambda b: b["labels"],
        lambda b: b["text"],
    ),
}


class Rare(Poisson):
    @property
    def sampling_probability(self) -> float:
        return 0.01


def sampled(keys):
    """The batches of the run with these keys."""
    return [Rare(num_examples=N, batch_size=1).indices(keys.stream("data"), t) for t in range(STEPS)]


# the first two batches are empty and the next two are not: one seed in 17
KEYS = next(k for k in map(fiberdp.Keys.seeded, count()) if [len(b) > 0 for b in sampled(k)] == [False, False, True, True])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        return self.head(torch.tanh(self.embedding(ids)).mean(1))


def loss_fn(kind, reads_text):
    _, ids, labels, texts = KINDS[kind]

    def loss(model, batch):
        losses = nn.functional.cross_entropy(model(ids(batch)), labels(batch), reduction="none")
        return losses * torch.tensor([float(len(t)) for t in texts(batch)]) if reads_text else losses

    return loss


def private(loss, dataset, engine, **options):
    plan = fiberdp.plan(method=PLAIN, num_examples=N, batch_size=1, steps=STEPS, noise_multiplier=1.0, delta=1e-3, clip_norm=C)
    plan = replace(plan, sampler=Rare(num_examples=N, batch_size=1))
    return plan.private(Bag(), loss, dataset, keys=KEYS, engine=engine, **options)


def outline(tree):
    """Structure, dtypes and the shape of one row."""
    if isinstance(tree, dict):
        return {key: outline(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(outline(value) for value in tree)
    return (tree.dtype, tuple(tree.shape[1:])) if isinstance(tree, Tensor) else type(tree)


def expected(kind, reads_text, step, theta):
    """The clipped sum of the step's examples, one at a time with plain autograd, [d]."""
    total = torch.zeros_like(theta)
    for i in sampled(KEYS)[step].tolist():
        model = Bag()
        nn.utils.vector_to_parameters(theta, model.parameters())
        loss = nn.functional.cross_entropy(model(IDS[i][None]), torch.tensor([i % 2])) * (len(text(i)) if reads_text else 1)
        u = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += u * min(1.0, C / float(u.norm()))
    return total


def test_a_batch_is_empty_with_probability_0_605():
    """5,000 steps: the standard error is .0069, and 4.5 of them .031; at q = .02, where B = 1 is exact, it would be .364."""
    stream, n, p = KEYS.stream("data"), 5_000, 0.99**50
    assert p == pytest.approx(0.605, abs=5e-4)
    empty = sum(len(Rare(num_examples=N, batch_size=1).indices(stream, t)) == 0 for t in range(n)) / n
    assert abs(empty - p) < 4.5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_the_structure_and_dtypes_of_a_full_one(kind):
    row, ids, labels, texts = KINDS[kind]
    source = as_source(Rows(row))
    full, empty = source.take(torch.tensor([3, 1])), source.take(torch.zeros(0, dtype=torch.int64))
    assert outline(empty) == outline(full)
    assert _tree.rows(full) == 2
    assert all(len(leaf) == 0 for leaf in _tree.leaves(empty))
    assert ids(empty).shape == (0, 3)
    assert ids(empty).dtype == labels(empty).dtype == torch.int64
    assert texts(full) == [text(3), text(1)]
    assert texts(empty) == []
    assert torch.equal(ids(full), IDS[[3, 1]])


@pytest.mark.parametrize(("engine", "reads_text"), [("loop", False), ("loop", True), ("vmap", False)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_after_empty_batches(kind, engine, reads_text):
    run = private(loss_fn(kind, reads_text), Rows(KINDS[kind][0]), engine)
    for t in range(STEPS):
        before = run.flat.theta.clone()
        run.step()
        z = KEYS.stream("noise").normal(t, 0, len(before))
        clipped = expected(kind, reads_text, t, before)
        assert (float(clipped.norm()) > 0) == (t >= 2)
        torch.testing.assert_close(run.flat.theta, before - clipped - C * z, rtol=1e-5, atol=1e-6)
        assert run.optimizer.t == len(run.ledger) == t + 1


def test_vmap_refuses_a_loss_that_reads_the_string_before_the_first_step(monkeypatch):
    monkeypatch.undo()  # the whole receipt: in 4 steps every batch may be empty
    with pytest.raises(ValueError, match="a field that is not a tensor"):
        private(loss_fn("dict", True), Rows(KINDS["dict"][0]), "vmap")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_collate_that_returns_an_encoding(engine):
    """transformers' DataCollatorWithPadding returns a BatchEncoding, which is a UserDict."""

    def collate(rows):
        return UserDict(_tree.collate(rows))

    run = private(loss_fn("encoding", False), Rows(KINDS["encoding"][0]), engine, collate=collate)
    assert len(list(run)) == STEPS


def test_a_string_that_comes_from_a_numpy_array():
    texts = np.array([text(i) for i in range(N)])
    source = as_source(Rows(lambda i: {"ids": IDS[i], "text": texts[i]}))
    assert source.take(torch.tensor([3, 1]))["text"] == [text(3), text(1)]
