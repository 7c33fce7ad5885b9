"""Frozen DINOv2 (arXiv 2304.07193) through timm: patch features of frames, computed whenever they are needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cli import UserError
from common.dataset import Batch, Sampler
from common.weights import read_weights


class Dino(nn.Module):
    """Frames uint8 (..., H, W, 3) to patch features float32 (..., N, 2 F): the last block's output, then its keys.

    The output is taken before the network's final norm, without the class token, as VideoSAUR does.

    Attributes: `patches` (N, a square), `dim` (F).
    """

    def __init__(self, vit: nn.Module, image_size: int) -> None:
        super().__init__()
        self.vit, self.image_size = vit.eval().requires_grad_(False), image_size
        self.dim: int = vit.num_features
        self.patches = math.prod(vit.patch_embed.grid_size)
        mean, std = (torch.tensor(vit.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, frames: Tensor) -> Tensor:
        shape, kind, last = frames.shape[:-3], frames.device.type, self.vit.blocks[-1]
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            image = F.interpolate(
                frames.flatten(0, -4).movedim(-1, 1).float() / 255,
                size=(self.image_size, self.image_size),
                mode="bilinear",
                antialias=self.image_size < frames.shape[-2],
            )
            before, output = self.vit.forward_intermediates(
                (image - self.mean) / self.std, indices=2, norm=False, output_fmt="NLC", intermediates_only=True
            )
            # Each patch has its own query, key and value, so the last block's can be computed again from its input.
            keys = last.attn.qkv(last.norm1(before))[..., self.dim : 2 * self.dim]
        # Joined outside of inference mode, whose tensors could not take part in training.
        return torch.cat([output.float(), keys.float()], dim=-1).unflatten(0, shape)


class FeatureSampler:
    """A `Sampler` of clips, with the features of their frames as `extra` of each batch: (B, 4, N, 2 F)."""

    def __init__(self, sampler: Sampler, dino: Dino) -> None:
        self.sampler, self.dino = sampler, dino

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def next(self) -> Batch:
        batch = self.sampler.next()
        return batch._replace(extra=self.dino(batch.frames))


def load_dino(name: str, checkpoint: Path | None, random: bool, image_size: int) -> Dino:
    """timm's Vision Transformer `name` for square images of `image_size` pixels, frozen.

    checkpoint: a file of weights, timm's or DINOv2's own (.pth or .safetensors); None: the Hugging Face hub's.
    random: seeded random weights instead. Raises UserError for a name that is no such network, a size that is no
    multiple of its patches, a file that does not fit it, and where there is no network connection.
    """
    import timm

    if checkpoint is not None and random:
        raise UserError("--dino-checkpoint and --dino-weights random exclude each other")
    options: dict[str, Any] = {"img_size": image_size, "num_classes": 0, "pretrained": not random}
    if checkpoint is not None:
        options["pretrained_cfg_overlay"] = {"state_dict": read_weights(checkpoint, "--dino-checkpoint")}
    with torch.random.fork_rng(devices=[]):  # the run's random numbers stay the same
        torch.random.default_generator.manual_seed(0)  # not those of the GPU
        try:
            vit = timm.create_model(name, **options)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if checkpoint is not None:
                raise UserError(f"--dino-checkpoint {checkpoint}: not the weights of {name} ({reason})") from error
            if not isinstance(error, OSError):
                raise UserError(
                    f"--dino-model {name}: not a Vision Transformer that timm can load ({reason})"
                ) from error
            raise UserError(
                f"{name}'s weights cannot be downloaded ({reason}); get them on another machine, from the Hugging Face "
                f"hub (timm/{name}) or DINOv2's authors, and name the file: --dino-checkpoint FILE"
            ) from error
    patch = vit.patch_embed.patch_size[0] if hasattr(vit, "patch_embed") else 1
    if image_size % patch:
        raise UserError(f"--dino-image-size is {image_size}, must be a multiple of {patch}, a patch of {name}")
    try:
        network = Dino(vit, image_size)
        network(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))  # some have no blocks, or keep the keys elsewhere
    except (AttributeError, IndexError, TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"--dino-model {name}: not a network such as vit_base_patch14_dinov2.lvd142m") from error
    if random:
        print(f"DINOv2: seeded random weights of {name}, for trying the code; the results say nothing about the method")
    return network
