"""Files of weights of networks that others trained: RAFT, DINOv2, SAM."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from common.cli import UserError
from common.store import system_error


def read_weights(path: Path, option: str, inside: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint (.safetensors, or what `torch.load` reads with `weights_only`) by their names.

    Args:
        option: the flag that named the file, for messages.
        inside: key of the dictionary of weights in the file, as in SAM's; None: the file is that dictionary.

    Raises UserError for a file that is missing or no checkpoint.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(f"{option} {path}: no such file")
    with open(path, "rb") as file:  # torch's own message about other files is long, and no help
        page = file.read(64).lstrip()[:1] == b"<"
    try:
        safe = path.suffix == ".safetensors"
        weights = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        weights = weights if inside is None else weights[inside]
    except MemoryError:
        raise
    except Exception as error:  # of a dozen classes
        if system := system_error(error, path):
            raise system from error
        what = "is a web page" if page else "is something else, or damaged"
        raise UserError(
            f"{option} {path}: {what}; expected is a file of weights (.pt, .pth or .safetensors), so get it again"
        ) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{option} {path}: holds no plain dictionary of weights")
    return weights


def weights_hash(weights: dict[str, Tensor]) -> str:
    """SHA-256 of weights and their names."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
