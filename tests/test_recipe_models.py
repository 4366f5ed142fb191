import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fiberdp.recipes import models
from fiberdp.recipes.data import load_digits

# builder, its outputs, one example's shape, parameters at those outputs
MODELS = [
    (models.mlp_digits, 10, (1, 8, 8), 64 * 48 + 48 + 48 * 10 + 10),
    (models.tramer_boneh_cnn, 10, (1, 28, 28), 26_010),
    (models.cnn5, 100, (3, 32, 32), 619_876),
]
each_model = pytest.mark.parametrize(("build", "outputs", "shape", "parameters"), MODELS)


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@each_model
def test_parameter_count_and_output_shape(build, outputs, shape, parameters):
    model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(pixels(2, *shape)).shape == (2, outputs)


def test_cnn5_counts_each_layer_and_narrows_with_its_outputs():
    counts = [sum(p.numel() for p in layer.parameters()) for layer in models.cnn5()]
    assert [n for n in counts if n] == [896, 64, 18_496, 128, 73_856, 256, 295_168, 512, 230_500]
    assert sum(p.numel() for p in models.cnn5(10).parameters()) == 412_426


@each_model
def test_per_example_gradients_of_vmap_equal_the_loop(build, outputs, shape, parameters):
    torch.manual_seed(0)
    model = build().double()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = pixels(3, *shape), torch.arange(3)

    def loss(theta, image, label):
        return nn.functional.cross_entropy(functional_call(model, theta, image[None]), label[None])

    together = vmap(grad(loss), (None, 0, 0), randomness="error")(theta, images, labels)
    for i in range(3):
        alone = torch.autograd.grad(nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]), list(model.parameters()))
        for (name, rows), single in zip(together.items(), alone):
            torch.testing.assert_close(rows[i], single, msg=name)
    assert max(rows.abs().max() for rows in together.values()) > 0


@each_model
def test_an_example_is_treated_on_its_own(build, outputs, shape, parameters):
    torch.manual_seed(0)
    model = build().double()
    images = pixels(3, *shape)
    before = model(images)
    images[1:] = 255 - images[1:]
    torch.testing.assert_close(model(images)[0], before[0], rtol=0, atol=1e-12)
    assert not torch.allclose(model(images)[1], before[1])


@each_model
def test_uint8_and_float_images_give_the_same_logits_and_stay_unchanged(build, outputs, shape, parameters):
    torch.manual_seed(0)
    model = build()
    images = pixels(2, *shape)
    scaled = images / 255
    kept = images.clone(), scaled.clone()
    torch.testing.assert_close(model(images), model(scaled))
    assert torch.equal(images, kept[0])
    assert torch.equal(scaled, kept[1])


def test_pixels_are_scaled_by_constants_of_the_format():
    grey = torch.arange(256, dtype=torch.uint8)
    expected = (torch.arange(256, dtype=torch.float64) / 255 - 0.5) / 0.5
    torch.testing.assert_close(models.scale_pixels(grey, torch.float64), expected, rtol=0, atol=1e-15)
    # One pixel's value does not depend on the others, as it would with the image's own mean.
    assert models.scale_pixels(grey[7:8], torch.float64) == models.scale_pixels(grey, torch.float64)[7]


def test_integer_images_of_unknown_range_are_refused():
    with pytest.raises(ValueError, match=r"torch\.int64: must be uint8") as refusal:
        models.mlp_digits()(torch.zeros(1, 1, 8, 8, dtype=torch.int64))
    assert "\n" not in str(refusal.value)


@each_model
def test_no_outputs_are_refused(build, outputs, shape, parameters):
    with pytest.raises(ValueError, match="num_outputs=0"):
        build(0)


def test_mlp_digits_learns_the_digits():
    rows = load_digits()
    torch.manual_seed(0)
    model = models.mlp_digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows["train"]["image"]), rows["train"]["label"]).backward()
        optimizer.step()
    correct = model(rows["test"]["image"]).argmax(1) == rows["test"]["label"]
    assert correct.float().mean() > 0.93
