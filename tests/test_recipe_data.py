import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fiberdp.recipes.data import CIFAR10, MNIST, ImageSource, load_digits, load_images, split_held_out

datasets = pytest.importorskip("datasets", reason="needs the recipes extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the recipes extra")
Image = pytest.importorskip("PIL.Image", reason="needs the recipes extra")

TINY = ImageSource("nobody/tiny", "tiny", "image", "label", num_classes=3)


def real(source):
    """The folder of real data, or skip: only FIBERDP_DATA says where it is."""
    root = os.environ.get("FIBERDP_DATA")
    if not root:
        pytest.skip("FIBERDP_DATA is not set")
    if not (Path(root) / source.folder).is_dir():
        pytest.skip(f"FIBERDP_DATA={root} has no folder {source.folder}")
    return root


def encode(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, lossless=True)
    return {"bytes": buffer.getvalue(), "path": None}


def random_pixels(rows, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


def write(file, images, labels, feature=None):
    """One Parquet file as the hub writes it: an Image feature and, unless told otherwise, a ClassLabel."""
    feature = feature or datasets.ClassLabel(num_classes=3)
    file.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    rows = {"image": images, "label": labels}
    table = datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:]
    parquet.write_table(table, file)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test of this file may reach for the network."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.fixture
def tiny(tmp_path):
    """A data set in the hub's layout: 6 train rows in two files (PNG, lossless WebP), 3 test rows, RGB."""
    pixels = random_pixels(9, (5, 4, 3))
    first, second = [encode(p) for p in pixels[:4]], [encode(p, "WEBP") for p in pixels[4:6]]
    write(tmp_path / "tiny" / "train-00000-of-00002.parquet", first, [0, 1, 2, 0])
    write(tmp_path / "tiny" / "train-00001-of-00002.parquet", second, [1, 2])
    write(tmp_path / "tiny" / "test-00000-of-00001.parquet", [encode(p) for p in pixels[6:]], [2, 1, 0])
    return tmp_path, torch.from_numpy(pixels).permute(0, 3, 1, 2)


def refusal(source, folder):
    with pytest.raises(ValueError) as caught:
        load_images(source, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_tiny(rows, pixels):
    assert torch.equal(rows["train"]["image"], pixels[:6])
    assert torch.equal(rows["test"]["image"], pixels[6:])
    assert rows["train"]["label"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["test"]["label"].tolist() == [2, 1, 0]
    assert rows["train"]["image"].is_contiguous()
    assert rows["train"]["label"].dtype == torch.int64


def test_the_hubs_layout_is_read_bit_for_bit_in_file_order(tiny):
    root, pixels = tiny
    check_tiny(load_images(TINY, root), pixels)
    check_tiny(load_images(TINY, str(root / "tiny")), pixels)


def test_fiberdp_data_stands_in_for_data_dir(tiny, monkeypatch):
    root, pixels = tiny
    monkeypatch.setenv("FIBERDP_DATA", str(root))
    check_tiny(load_images(TINY), pixels)


def test_the_hub_is_streamed_by_name_when_no_folder_is_given(tiny, monkeypatch):
    root, pixels = tiny
    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    asked = []
    real_load = datasets.load_dataset

    def from_disk(name, **kwargs):
        asked.append((name, kwargs["streaming"], Path(kwargs["cache_dir"])))
        return real_load(str(root / "tiny"), **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, timeout: None)
    check_tiny(load_images(TINY), pixels)
    [(name, streaming, scratch)] = asked
    assert (name, streaming, scratch.exists()) == ("nobody/tiny", True, False)


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach it\non the Hub"), RuntimeError("closed")])
def test_an_unreachable_hub_is_one_line_that_names_the_alternative(monkeypatch, error):
    def unreachable(*args, **kwargs):
        raise error

    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, timeout: None)
    with pytest.raises(ConnectionError, match=r"ylecun/mnist.*--data DIR") as caught:
        load_images(MNIST)
    assert "\n" not in str(caught.value)


def test_local_files_write_no_cache_and_ask_no_server(tiny):
    root, _ = tiny
    cache = root / "cache"
    cache.mkdir()
    code = (
        "import sys; from fiberdp.recipes.data import *; from fiberdp.recipes import models\n"
        "assert not {'datasets', 'PIL', 'sklearn'} & set(sys.modules), 'imported at module level'\n"
        "asked = []\n"
        "sys.addaudithook(lambda event, args: asked.append(event) if event in EVENTS else None)\n"
        "EVENTS = ('socket.connect', 'socket.getaddrinfo')\n"
        f"load_images(ImageSource('nobody/tiny', 'tiny', 'image', 'label', 3), {str(root)!r})\n"
        "assert not asked, asked\n"
    )
    keys = ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TMPDIR")
    env = {**os.environ, **{key: str(cache) for key in keys}}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(cache.rglob("*")) == []


def test_a_missing_folder_or_split_is_refused(tiny):
    root, _ = tiny
    assert "nowhere" in refusal(TINY, root / "nowhere")
    assert "no train-*.parquet and no test-*.parquet" in refusal(MNIST, root)
    (root / "tiny" / "test-00000-of-00001.parquet").unlink()
    message = refusal(TINY, root)
    assert "no test-*.parquet there" in message
    assert "train-*.parquet" not in message


def test_missing_columns_are_refused_with_those_found_and_those_needed(tiny):
    root, _ = tiny
    message = refusal(ImageSource("nobody/tiny", "tiny", "img", "fine_label", 3), root)
    assert "has the columns image, label, but img and fine_label are needed" in message


@pytest.mark.parametrize("labels", [[0, 3], [-1, 2]])
def test_labels_outside_the_classes_are_refused(tmp_path, labels):
    images = [encode(p) for p in random_pixels(2, (4, 4))]
    for split in ("train", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", images, labels, feature=datasets.Value("int64"))
    assert f"labels run from {labels[0]} to {labels[1]}; they must lie in [0, 2]" in refusal(TINY, tmp_path)


@pytest.mark.parametrize(("feature", "labels"), [("string", ["a", "b"]), ("int64", [0, None])])
def test_labels_that_are_no_numbers_are_refused(tmp_path, feature, labels):
    images = [encode(p) for p in random_pixels(2, (4, 4))]
    for split in ("train", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", images, labels, feature=datasets.Value(feature))
    assert "each must be a whole number" in refusal(TINY, tmp_path)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (encode(random_pixels(1, (4, 5))[0]), "row 1 is 5x4 L and that of row 0 4x4 L"),
        (encode(random_pixels(1, (4, 4, 3))[0]), "row 1 is 4x4 RGB and that of row 0 4x4 L"),
        ({"bytes": b"no image", "path": None}, "row 1 cannot be decoded"),
        (
            {"bytes": encode(random_pixels(1, (4, 4))[0])["bytes"][:50], "path": None},
            "row 1 cannot be decoded",
        ),
        ({"bytes": None, "path": "elsewhere.png"}, "row 1 cannot be decoded"),
    ],
)
def test_images_that_do_not_fit_one_tensor_are_refused(tmp_path, second, expected):
    images = [encode(random_pixels(1, (4, 4))[0]), second]
    for split in ("train", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", images, [0, 1])
    assert expected in refusal(TINY, tmp_path)


def test_splits_of_different_shape_an_empty_split_and_a_broken_file_are_refused(tmp_path):
    train, test = (tmp_path / f"{split}-00000-of-00001.parquet" for split in ("train", "test"))
    write(train, [encode(random_pixels(1, (4, 4))[0])], [0])
    write(test, [encode(random_pixels(1, (5, 5))[0])], [0])
    assert "train images are (1, 4, 4) and test images (1, 5, 5)" in refusal(TINY, tmp_path)
    write(test, [], [])
    assert "tiny test: has no rows" in refusal(TINY, tmp_path)
    test.write_bytes(b"PAR1 no more")
    assert "must be readable Parquet files" in refusal(TINY, tmp_path)


def test_images_outside_the_hubs_layout_are_refused(tmp_path):
    for split in ("train", "test"):
        rows = datasets.Dataset.from_dict({"image": [[1, 2], [3, 4]], "label": [0, 1]})
        with open(tmp_path / f"{split}-00000-of-00001.parquet", "wb") as file:
            rows.to_parquet(file)
    assert "they must be a struct with a field `bytes`" in refusal(TINY, tmp_path)


@pytest.mark.parametrize(
    ("module", "load"),
    [("datasets", lambda root: load_images(TINY, root)), ("sklearn.datasets", lambda root: load_digits())],
)
def test_a_missing_extra_names_the_install(tiny, monkeypatch, module, load):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install fiberdp\[recipes\]") as caught:
        load(tiny[0])
    assert "\n" not in str(caught.value)


def test_digits_are_whole_and_split_by_index():
    from sklearn.datasets import load_digits as original

    rows, digits = load_digits(), original()
    assert torch.equal(rows["test"]["label"], torch.from_numpy(digits.target[::7]))
    assert torch.equal(rows["test"]["image"] * 16, torch.from_numpy(digits.images[::7]).float()[:, None])
    for key in ("image", "label"):
        assert len(rows["train"][key]) == 1540
        assert len(rows["test"][key]) == 257
    together = torch.cat([rows["train"]["label"], rows["test"]["label"]])
    assert torch.equal(together.bincount(), torch.from_numpy(np.bincount(digits.target)))
    assert int(rows["test"]["label"].bincount().min()) >= 20
    assert rows["train"]["image"].dtype == torch.float32
    assert (rows["train"]["image"].min(), rows["train"]["image"].max()) == (0, 1)


def test_the_last_rows_are_held_out():
    rows = {"image": torch.arange(10).view(10, 1, 1, 1), "label": torch.arange(10)}
    train, held_out = split_held_out(rows, 3)
    assert (train["label"].tolist(), held_out["label"].tolist()) == (list(range(7)), [7, 8, 9])
    assert held_out["image"].flatten().tolist() == [7, 8, 9]
    assert [len(part["label"]) for part in split_held_out(rows, 0)] == [10, 0]
    for count in (-1, 10, 2.5, True):
        with pytest.raises(ValueError, match="held_out="):
            split_held_out(rows, count)  # type: ignore[arg-type]


def test_mnist_is_complete():
    rows = load_images(MNIST, real(MNIST))
    assert tuple(rows["train"]["image"].shape) == (60_000, 1, 28, 28)
    assert tuple(rows["test"]["image"].shape) == (10_000, 1, 28, 28)
    assert rows["train"]["label"][:5].tolist() == [5, 0, 4, 1, 9]
    assert rows["test"]["label"][:5].tolist() == [7, 2, 1, 0, 4]
    assert rows["train"]["image"].numpy().mean() / 255 == pytest.approx(0.1307, abs=5e-5)


def test_cifar10_is_complete_and_holds_out_its_last_rows():
    rows = load_images(CIFAR10, real(CIFAR10))
    assert tuple(rows["train"]["image"].shape) == (50_000, 3, 32, 32)
    assert rows["train"]["label"].bincount().tolist() == [5_000] * 10
    mean = rows["train"]["image"].numpy().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    train, held_out = split_held_out(rows["train"], 5_000)
    assert (len(train["label"]), len(held_out["label"])) == (45_000, 5_000)
    assert torch.equal(held_out["image"][0], rows["train"]["image"][45_000])
