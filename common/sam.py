"""SAM 2.1's video predictor on several episodes at once, with frames from memory.

The networks, their weights and the step of the tracker are those of the `sam2` package. Instead of its `init_state`,
which wants JPEG files and holds every frame as float32, and its `propagate_in_video`, which keeps the memory of every
frame, `Tracker` takes frame t of all episodes as one batch and forgets what the model can no longer reach.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.cli import UserError
from common.weights import read_weights

MODELS = ("tiny", "small", "base-plus", "large")  # sizes of the image encoder
HUB = "facebook/sam2.1-hiera-"  # and the model: its repository on the Hugging Face hub
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that SAM 2 was trained on


def _package() -> Any:
    try:
        from sam2 import build_sam
    except ImportError as error:
        install = "SAM2_BUILD_CUDA=0 pip install --no-build-isolation -r requirements-sam.txt"
        raise UserError(f"SAM 2.1 needs the sam2 package ({error}); install it with: {install}") from error
    return build_sam


def download_checkpoint(model: str) -> Path:
    """The weights of `model` (one of MODELS), from the Hugging Face hub or its local cache.

    Raises UserError where there is no network and no cached copy.
    """
    repository = f"{HUB}{model}"
    file_name = _package().HF_MODEL_ID_TO_FILENAMES[repository][1]
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo_id=repository, filename=file_name))
    # The hub's client raises OSError for what it cannot reach, ValueError for what is not cached, and its HTTP
    # library's own errors for broken connections; it may not be installed at all.
    except Exception as error:
        raise UserError(
            f"the weights of SAM 2.1 ({model}) cannot be downloaded ({type(error).__name__}); get {file_name} from "
            f"https://huggingface.co/{repository} on another machine and pass it: --checkpoint {file_name}"
        ) from error


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], str]:
    """The weights in a checkpoint of SAM 2.1, and the file's SHA-256. UserError if the file is something else."""
    weights = read_weights(path, "--checkpoint", inside="model")
    return weights, hashlib.sha256(path.read_bytes()).hexdigest()


def load_predictor(model: str, weights: dict[str, Tensor] | None, image_size: int, device: torch.device) -> nn.Module:
    """The package's SAM2VideoPredictor with `weights`, for frames of `image_size` pixels (a multiple of 32).

    weights None: random ones from torch's generator, for tests and timing. UserError if they belong to another model.
    """
    package = _package()
    config = package.HF_MODEL_ID_TO_FILENAMES[f"{HUB}{model}"][0]
    # The package fills small holes with a CUDA extension only, and not at all without it, so masks would depend on how
    # it was installed: filling stays off.
    overrides = [f"++model.image_size={image_size}", "++model.fill_hole_area=0"]
    predictor = package.build_sam2_video_predictor(config, None, device="cpu", hydra_overrides_extra=overrides)
    if weights is not None:
        try:
            predictor.load_state_dict(weights)
        except RuntimeError as error:
            hint = f"choose the --model that it belongs to ({', '.join(MODELS)})"
            if "no_obj_embed_spatial" not in weights:
                hint = "it may be one of SAM 2; SAM 2.1's are named sam2.1_hiera_*.pt"
            raise UserError(f"--checkpoint does not fit SAM 2.1 {model}; {hint}") from error
    assert predictor.memory_temporal_stride_for_eval == 1  # Tracker forgets by it
    return predictor.to(device).eval()


def compile_predictor(predictor: nn.Module) -> None:
    """torch.compile for the image encoder, the mask decoder and the memory encoder.

    Not for the memory attention: the number of memories grows over the first frames, and its rotary encoding is made of
    complex numbers, for which the compiler generates no code. Positional encodings are cached on first use, which
    cannot happen while compiling: two steps run before.
    """
    warm = Tracker(predictor, (0, 0, 8, 8), (64, 64), 1, 2)
    for _ in range(2):
        warm.step(torch.zeros(1, 64, 64, 3, dtype=torch.uint8, device=predictor.device))
    for module in (predictor.image_encoder, predictor.sam_mask_decoder, predictor.memory_encoder):
        module.forward = torch.compile(module.forward)


def prepare(frames: Tensor, image_size: int) -> Tensor:
    """uint8 frames (B, H, W, 3) as the image encoder wants them: float32 (B, 3, image_size, image_size), normalised.

    Bicubic, rows first, and rounded to whole levels after each direction, as the package's own loader does it with PIL.
    """
    images = frames.permute(0, 3, 1, 2).float()
    for size in ((frames.shape[1], image_size), (image_size, image_size)):
        images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)
        images = images.clamp_(0, 255).round_()
    images.div_(255)
    for channel, (mean, std) in enumerate(zip(MEAN, STD)):  # numbers, since a tensor of them would wait for the device
        images[:, channel].sub_(mean).div_(std)
    return images


class Tracker:
    """Follows one object in each of several videos, frame by frame, from a box around it in the first frame.

    All videos are at the same frame. Of the memory that the model attends to (the first frame, the last six, and
    the pointers of the last fifteen) nothing older is kept.

    Args:
        boxes: (x0, y0, x1, y1) in pixels of the frames, one for each video or the same for all.
        size: height and width of the frames.
        batch: number of videos.
        num_frames: of the longest video. The model scales time by it below its 16 pointers, so shorter videos must all
            have the same length.
    """

    def __init__(self, predictor: nn.Module, boxes: Any, size: tuple[int, int], batch: int, num_frames: int) -> None:
        self.predictor, self.size, self.num_frames, self.frame = predictor, size, num_frames, 0
        self.memory: dict[str, dict[int, dict[str, Any]]] = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
        scale = torch.tensor([size[1], size[0]])
        corners = torch.as_tensor(np.asarray(boxes), dtype=torch.float32).view(-1, 2, 2) / scale * predictor.image_size
        self._prompt = {  # a box is two points with labels of their own
            "point_coords": corners.expand(batch, 2, 2).to(predictor.device),
            "point_labels": torch.tensor([[2, 3]], dtype=torch.int32).expand(batch, 2).to(predictor.device),
        }

    @torch.inference_mode()
    def step(self, frames: Tensor) -> Tensor:
        """Mask logits, float32 (B, H, W), of the next frame of every video: uint8 (B, H, W, 3) on the device."""
        predictor, t, device = self.predictor, self.frame, self.predictor.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = predictor.forward_image(prepare(frames, predictor.image_size))
            _, vision, positions, sizes = predictor._prepare_backbone_features(features)
            out = predictor.track_step(
                frame_idx=t,
                is_init_cond_frame=t == 0,
                current_vision_feats=vision,
                current_vision_pos_embeds=positions,
                feat_sizes=sizes,
                point_inputs=self._prompt if t == 0 else None,
                mask_inputs=None,
                output_dict=self.memory,
                num_frames=self.num_frames,
            )
        recent = self.memory["non_cond_frame_outputs"]
        (recent if t else self.memory["cond_frame_outputs"])[t] = {
            "maskmem_features": out["maskmem_features"].to(torch.bfloat16),  # as the package stores it
            "maskmem_pos_enc": out["maskmem_pos_enc"],
            "obj_ptr": out["obj_ptr"],
        }
        # The next frame attends to num_maskmem - 1 frames before it, and to the pointers of some more.
        if (old := t + 1 - predictor.num_maskmem) in recent:
            recent[old] = {"obj_ptr": recent[old]["obj_ptr"]}
        recent.pop(t + 1 - predictor.max_obj_ptrs_in_encoder, None)
        self.frame += 1
        return F.interpolate(out["pred_masks"].float(), self.size, mode="bilinear", align_corners=False)[:, 0]

    def keep(self, count: int) -> None:
        """Continue with the first `count` videos only."""
        # Cloned, so that the memory of the others is freed.
        self.memory = tree_map(lambda value: value[:count].clone(), self.memory)


def group_episodes(lengths: Sequence[int], batch: int, pointers: int) -> list[list[int]]:
    """Episode numbers in groups of at most `batch`, each from the longest to the shortest, of similar length.

    Episodes shorter than `pointers` frames are in a group with others of the same length only.
    """
    order = sorted(range(len(lengths)), key=lambda episode: -lengths[episode])
    groups: list[list[int]] = []
    for _, alike in itertools.groupby(order, key=lambda episode: min(lengths[episode], pointers)):
        episodes = list(alike)
        groups += [episodes[first : first + batch] for first in range(0, len(episodes), batch)]
    return groups


@torch.inference_mode()
def segment_episodes(
    predictor: nn.Module,
    episodes: Sequence[np.ndarray],
    boxes: Any,
    batch: int,
    tick: Callable[[int], None] = lambda frames: None,
) -> list[np.ndarray]:
    """Masks of the object in its box in every frame of every episode.

    Args:
        episodes: uint8 (L, H, W, 3) each, of one size; memory maps are read frame by frame.
        boxes: (x0, y0, x1, y1) in pixels, in the first frames; or one for each episode, (N, 4).
        batch: episodes that run side by side.
        tick: called after every step with the number of frames; an exception from it ends the work.

    Returns the masks (logits above zero), bit-packed, uint8 (L, H W / 8) each.
    """
    lengths = [len(episode) for episode in episodes]
    height, width = episodes[0].shape[1:3]
    masks: dict[int, np.ndarray] = {}
    boxes = np.broadcast_to(boxes, (len(episodes), 4))
    for group in group_episodes(lengths, batch, predictor.max_obj_ptrs_in_encoder):
        longest = lengths[group[0]]
        tracker = Tracker(predictor, boxes[group], (height, width), len(group), longest)
        # Masks stay on the device until the group is done, so that no step waits for a copy.
        inside = torch.zeros(len(group), longest, height, width, dtype=torch.bool, device=predictor.device)
        alive = len(group)
        for t in range(longest):
            if (running := sum(lengths[episode] > t for episode in group)) < alive:
                alive = running
                tracker.keep(alive)
            frames = torch.from_numpy(np.stack([episodes[episode][t] for episode in group[:alive]]))
            if predictor.device.type == "cuda":  # from pinned memory, so that the copy waits for no step either
                frames = frames.pin_memory().to(predictor.device, non_blocking=True)
            inside[:alive, t] = tracker.step(frames) > 0
            tick(alive)
        for row, episode in enumerate(group):
            masks[episode] = np.packbits(inside[row, : lengths[episode]].flatten(1).cpu().numpy(), axis=1)
    return [masks[episode] for episode in range(len(episodes))]
