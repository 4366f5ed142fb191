"""theta is one vector (paper, eq. 1), and the module's parameters are views into it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fiberdp.flat import FlatParameters


def test_parameters_are_views_into_one_vector():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = [p.detach().clone() for p in model.parameters()]
    flat = FlatParameters(model)
    assert flat.numel == 14
    assert flat.theta.is_contiguous()
    assert torch.equal(flat.theta, torch.cat([p.flatten() for p in before]))
    flat.theta.mul_(2)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, 2 * old)
    for slot, (name, p) in zip(flat.slots, model.named_parameters(), strict=True):
        assert slot.name == name
        assert flat.views(flat.theta)[name].data_ptr() == p.data_ptr()


def test_tied_weights_are_one_slice():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert FlatParameters(model).numel == 15


def test_frozen_parameters_are_left_alone_and_cannot_be_thawed_in_mid_run():
    """CASES E05: the call is refused."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    place = model.weight.data_ptr()
    flat = FlatParameters(model)
    assert flat.numel == 2
    assert model.weight.data_ptr() == place
    flat.check()
    model.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="changed in mid-run"):
        flat.check()


def test_a_model_that_was_moved_away_from_theta_is_refused():
    model = nn.Linear(2, 2)
    flat = FlatParameters(model)
    model.double()
    with pytest.raises(ValueError, match="no longer lies in theta"):
        flat.check()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.ReLU()), "no trainable parameter"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "one vector"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), "floating-point"),
        (nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16)), "float32 or float64"),
    ],
)
def test_what_cannot_be_one_vector_is_refused_in_one_line(model, said):
    with pytest.raises(ValueError, match=said) as error:
        FlatParameters(model)
    assert "\n" not in str(error.value)
