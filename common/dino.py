"""Frozen DINOv2 (arXiv 2304.07193) through timm: features of every frame of a data set, from files or on the fly."""

from __future__ import annotations

import hashlib
import math
import pickle
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cache import attach_per_frame
from common.dataset import Batch, Dataset, Sampler
from common.errors import UserError
from common.shards import DamagedShard, Shard, read_sidecar, remove_stale_parts, sidecar_path

CLIP = (-2, -1, 0, 1)  # frames of a clip relative to t: a window of `Sampler` with max_offset=1


class Dino(nn.Module):
    """Frames uint8 (..., H, W, 3) to patch features float16 (..., N, 2 F): the last block's output, then its keys.

    The output is taken before the network's final norm, without the class token, as VideoSAUR does.
    """

    def __init__(self, vit: nn.Module, image_size: int) -> None:
        super().__init__()
        self.vit, self.image_size = vit.eval().requires_grad_(False), image_size
        self.dim: int = vit.num_features
        mean, std = (torch.tensor(vit.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self._projected: list[Tensor] = []  # queries, keys and values of the last block
        vit.blocks[-1].attn.qkv.register_forward_hook(lambda _, inputs, output: self._projected.append(output))

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        shape = frames.shape[:-3]
        size = (self.image_size, self.image_size)
        smaller = self.image_size < frames.shape[-2]
        image = frames.flatten(0, -4).movedim(-1, 1).float() / 255
        image = F.interpolate(image, size=size, mode="bilinear", antialias=smaller)
        with torch.autocast(image.device.type, torch.bfloat16, enabled=image.device.type == "cuda"):
            tokens = self.vit.forward_intermediates(
                (image - self.mean) / self.std, indices=1, norm=False, output_fmt="NLC", intermediates_only=True
            )[0]
        keys = self._projected.pop()[:, self.vit.num_prefix_tokens :, self.dim : 2 * self.dim]
        return torch.cat([tokens, keys], dim=-1).half().unflatten(0, shape)


def load_dino(name: str, checkpoint: Path | None, random: bool, image_size: int, device: torch.device) -> Dino:
    """timm's Vision Transformer `name` for square images, frozen.

    checkpoint: a file of weights, timm's or DINOv2's own (.pth or .safetensors); None: the Hugging Face hub's.
    random: seeded random weights instead. Raises UserError for a name that is no such network, a file that does not fit
    it, and where there is no network connection.
    """
    import timm

    options: dict[str, Any] = {"img_size": image_size, "num_classes": 0}
    if checkpoint is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": _read(checkpoint)}}
    else:
        options["pretrained"] = not random
    with torch.random.fork_rng(devices=[]):  # the run's random numbers stay the same
        torch.random.default_generator.manual_seed(0)  # not those of the GPU
        try:
            vit = timm.create_model(name, **options)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if not timm.is_model(name.split(".")[0]):
                raise UserError(f"--dino-model {name}: timm has no network of that name") from error
            if checkpoint is not None:
                raise UserError(f"--dino-checkpoint {checkpoint}: not the weights of {name} ({reason})") from error
            raise UserError(
                f"{name}'s weights cannot be downloaded ({reason}); get them on another machine, from the Hugging Face "
                f"hub (timm/{name}) or DINOv2's authors, and name the file: --dino-checkpoint FILE"
            ) from error
    try:
        network = Dino(vit, image_size)
        network(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))  # some have no blocks, or keep the keys elsewhere
    except (AttributeError, IndexError, TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"--dino-model {name}: not a network such as vit_base_patch14_dinov2.lvd142m") from error
    return network.to(device)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"--dino-checkpoint {path}: no such file (where the features are complete, leave the flag out)")
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            return safetensors.torch.load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors' errors have no other common base
        expected = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile)
        if not isinstance(error, expected) and type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"--dino-checkpoint {path}: not a readable file of weights ({error})") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"--dino-checkpoint {path}: holds no plain dictionary of weights, as DINOv2's files do")
    return weights


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of a module's weights and their names."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _has_features(shard: Shard, render: str) -> bool:
    try:
        return f"{render}/features" in read_sidecar(sidecar_path(shard.path, "dino"), shard).datasets
    except DamagedShard:
        return False


class Features:
    """DINOv2 features of data sets: from files beside their shards, or computed whenever they are asked for.

    Args:
        name, checkpoint, random, image_size: as for `load_dino`.
        cache: keep the features of every frame in <shard>.dino.h5, where the disk has room for all of them.

    Attributes: `patches` (N, a square), `dim` (F), `settings` of the features, `seconds` spent on files.
    """

    def __init__(
        self, name: str, checkpoint: Path | None, random: bool, image_size: int, cache: bool, device: torch.device
    ) -> None:
        import timm

        self.name, self.checkpoint, self.random, self.image_size = name, checkpoint, random, image_size
        self.cache, self.device, self.seconds = cache, device, 0.0
        self._dino: Dino | None = None
        if checkpoint is not None and random:
            raise UserError("--dino-checkpoint and --dino-weights random exclude each other")
        try:
            with torch.random.fork_rng(devices=[]):
                vit = timm.create_model(name, pretrained=False, img_size=image_size, num_classes=0)
            self.dim: int = vit.num_features
            self.patches = math.prod(vit.patch_embed.grid_size)
            patch = vit.patch_embed.patch_size[0]
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(f"--dino-model {name}: not a Vision Transformer that timm has ({error})") from error
        if image_size < patch or image_size % patch:
            raise UserError(f"--dino-image-size is {image_size}, must be a multiple of {patch}, a patch of {name}")
        self.settings: dict[str, Any] = {"model": name, "image_size": image_size, "random": random}
        if checkpoint is not None:  # features that another file's weights gave are refused
            self.settings["weights"] = weights_hash(self.dino.vit)
        if random:
            print(f"DINOv2: seeded random weights of {name}, for trying the code out; the results say nothing about "
                  "the method", flush=True)  # fmt: skip

    @property
    def dino(self) -> Dino:
        """The network; its weights are loaded, and downloaded, when they are needed first."""
        if self._dino is None:
            self._dino = load_dino(self.name, self.checkpoint, self.random, self.image_size, self.device)
        return self._dino

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame's features."""
        return 2 * self.patches * 2 * self.dim

    def attach(self, *datasets: Dataset) -> None:
        """Makes the files of the data sets that are missing, unless the features are computed on the fly.

        Says beforehand how much disk and time it takes. Raises UserError for files of other settings.
        """
        if self.cache:
            for dataset in datasets:
                remove_stale_parts(dataset.folder)  # of a killed run, as large as a whole file
            missing = [shard for d in datasets for shard in d.shards if not _has_features(shard, d.render)]
            frames, free = sum(shard.frames for shard in missing), shutil.disk_usage(datasets[0].folder).free
            files = [path for shard in missing if (path := sidecar_path(shard.path, "dino")).exists()]
            twice = max((path.stat().st_size for path in files), default=0)  # while the other render is copied
            if frames:
                rate = self.measure(datasets[0])
                needed = f"{frames * self.frame_bytes / 1e9:,.1f} GB"
                print(
                    f"DINOv2 features of {frames:,} frames: {needed} beside the shards, {free / 1e9:,.1f} GB are free; "
                    f"about {frames / rate / 3600:,.2f} hours at {rate:,.1f} frames/s",
                    flush=True,
                )
            if frames * self.frame_bytes + twice > free * 0.95:
                print("that does not fit: the features are computed whenever they are needed", flush=True)
                self.cache = False
        if not self.cache:
            self.settings["weights"] = weights_hash(self.dino.vit)
            return

        def prepare() -> tuple[Dino, dict[str, str]]:
            return self.dino, {"weights": weights_hash(self.dino.vit)}

        for dataset in datasets:
            self.seconds += attach_per_frame(
                dataset, "dino", "features", self.settings, prepare, self.device, pairs=False, offsets=CLIP
            )
            self.settings = self.settings | dataset.extra_settings["dino"]
        self._dino = None  # what it gives lies in the files now

    def measure(self, dataset: Dataset) -> float:
        """Frames per second of the network and of the hash of its output, measured on a few of a data set's."""
        count = 64 if self.device.type == "cuda" else 8
        frames = torch.from_numpy(dataset.frames(np.arange(min(count, dataset.num_frames)))).to(self.device)
        self.dino(frames)
        start = time.perf_counter()
        hashlib.sha256(self.dino(frames).cpu().numpy().data)
        return len(frames) / (time.perf_counter() - start)

    def of(self, dataset: Dataset, index: np.ndarray) -> Tensor:
        """Features float16 (..., N, 2 F) on `device` of frames at global indices (...,)."""
        if self.cache:
            return torch.from_numpy(dataset.extra("dino", index)).to(self.device)
        return self.dino(torch.from_numpy(dataset.frames(index)).to(self.device))

    def sampler(self, dataset: Dataset, batch_size: int, **options: Any) -> Any:
        """A `Sampler` of clips of four frames, [t-2 .. t+1]: `extra` of its batches has the features (B, 4, N, 2 F)."""
        options |= {"max_offset": 1, "device": self.device}
        if self.cache:
            if options.get("on_device") is True:  # what --data-on-gpu always asks for are frames
                options["on_device"] = "auto"
            return Sampler(dataset, batch_size, extra="dino", frames=False, **options)
        return _ComputedFeatures(Sampler(dataset, batch_size, **options), self.dino)


class _ComputedFeatures:
    """A sampler whose batches get the features of their frames."""

    def __init__(self, sampler: Sampler, dino: Dino) -> None:
        self.sampler, self.dino = sampler, dino

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def next(self) -> Batch:
        batch = self.sampler.next()
        return batch._replace(extra=self.dino(batch.frames))
