"""SAM 2.1's video predictor on several episodes at once, with frames from memory.

The networks, their weights and the step of the tracker are those of the `sam2` package. Instead of its `init_state`,
which wants JPEG files and holds every frame as float32, and its `propagate_in_video`, which keeps the memory of every
frame, `Tracker` takes frame t of all episodes as one batch and forgets what the model can no longer reach.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError

if TYPE_CHECKING:
    from sam2.sam2_video_predictor import SAM2VideoPredictor

MODELS = {  # as --model names them -> repository on the Hugging Face hub
    "tiny": "facebook/sam2.1-hiera-tiny",
    "small": "facebook/sam2.1-hiera-small",
    "base-plus": "facebook/sam2.1-hiera-base-plus",
    "large": "facebook/sam2.1-hiera-large",
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that SAM 2 was trained on
INSTALL = "SAM2_BUILD_CUDA=0 pip install --no-build-isolation -r requirements-sam.txt"
UPLOAD = 64  # frames of each episode that go to the device at once


def _package() -> Any:
    try:
        from sam2 import build_sam
    except ImportError as error:
        raise UserError(f"SAM 2.1 needs the sam2 package ({error}); install it with: {INSTALL}") from error
    return build_sam


def find_checkpoint(model: str) -> Path:
    """The weights of `model` (a key of MODELS), from the Hugging Face hub or its local cache.

    Raises UserError where there is no network and no cached copy.
    """
    repository = MODELS[model]
    file_name = _package().HF_MODEL_ID_TO_FILENAMES[repository][1]
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise UserError(f"downloading SAM 2.1 needs huggingface_hub ({error}); install it with: {INSTALL}") from error
    try:
        return Path(hf_hub_download(repo_id=repository, filename=file_name))
    # The hub's client raises OSError for what it cannot reach, ValueError for what is not cached, and its HTTP
    # library's own errors for broken connections.
    except Exception as error:
        raise UserError(
            f"the weights of SAM 2.1 ({model}) cannot be downloaded ({type(error).__name__}); get {file_name} from "
            f"https://huggingface.co/{repository} on another machine and name it: --checkpoint {file_name}"
        ) from error


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path) -> None:
    """UserError if there is no checkpoint at `path`."""
    if not path.is_file():
        raise UserError(f"--checkpoint {path}: no such file")


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint of SAM 2.1. UserError if the file is something else."""
    check_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--checkpoint {path}: not a checkpoint of torch, or damaged ({reason})") from error
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"--checkpoint {path}: holds no 'model', so it is not a checkpoint of SAM 2.1")
    return weights


def load_predictor(
    model: str, weights: dict[str, Tensor] | None, image_size: int, device: torch.device, name: str = "the checkpoint"
) -> SAM2VideoPredictor:
    """The package's video predictor with `weights`, for frames of `image_size` pixels (a multiple of 32).

    weights None: random ones from torch's generator, for tests and timing. Filling small holes stays off: the package
    does it with a CUDA extension only, and not at all without, so masks would depend on how it was installed.

    Raises:
        UserError: the weights do not belong to the model.
    """
    package = _package()
    config = package.HF_MODEL_ID_TO_FILENAMES[MODELS[model]][0]
    overrides = [f"++model.image_size={image_size}", "++model.fill_hole_area=0"]
    predictor = package.build_sam2_video_predictor(config, None, device="cpu", hydra_overrides_extra=overrides)
    if weights is not None:
        expected = predictor.state_dict()
        wrong = [key for key in expected.keys() & weights.keys() if expected[key].shape != weights[key].shape]
        missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
        if wrong or missing or unexpected:
            hint = f"choose the --model that it belongs to ({', '.join(MODELS)})"
            if not wrong and "no_obj_embed_spatial" in missing:
                hint = "it may be one of SAM 2; SAM 2.1's are named sam2.1_hiera_*.pt"
            raise UserError(
                f"{name} does not fit SAM 2.1 {model}: {len(missing)} weights are missing, {len(unexpected)} are not "
                f"known and {len(wrong)} have another shape; {hint}"
            )
        predictor.load_state_dict(weights)
    assert predictor.memory_temporal_stride_for_eval == 1  # Tracker forgets by it
    return predictor.to(device).eval()


def compile_predictor(predictor: SAM2VideoPredictor) -> None:
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
        box: (x0, y0, x1, y1) in pixels of the frames, the same for every video.
        size: height and width of the frames.
        batch: number of videos.
        num_frames: of the longest video. The model scales time by it below its 16 pointers, so shorter videos must all
            have the same length.
    """

    def __init__(
        self,
        predictor: SAM2VideoPredictor,
        box: Sequence[float],
        size: tuple[int, int],
        batch: int,
        num_frames: int,
    ) -> None:
        self.predictor, self.size, self.num_frames, self.frame = predictor, size, num_frames, 0
        self.memory: dict[str, dict[int, dict[str, Any]]] = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
        scale = torch.tensor([size[1], size[0]])
        corners = torch.tensor(box, dtype=torch.float32).view(1, 2, 2) / scale * predictor.image_size
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
        self._remember(out)
        self.frame += 1
        return F.interpolate(out["pred_masks"].float(), self.size, mode="bilinear", align_corners=False)[:, 0]

    def _remember(self, out: dict[str, Any]) -> None:
        kind = "non_cond_frame_outputs" if self.frame else "cond_frame_outputs"
        recent = self.memory["non_cond_frame_outputs"]
        self.memory[kind][self.frame] = {
            "maskmem_features": out["maskmem_features"].to(torch.bfloat16),  # as the package stores it
            "maskmem_pos_enc": out["maskmem_pos_enc"],
            "obj_ptr": out["obj_ptr"],
        }
        # The next frame attends to num_maskmem - 1 frames before it, and to the pointers of some more.
        if (old := self.frame + 1 - self.predictor.num_maskmem) in recent:
            recent[old] = {"obj_ptr": recent[old]["obj_ptr"]}
        recent.pop(self.frame + 1 - self.predictor.max_obj_ptrs_in_encoder, None)

    def keep(self, count: int) -> None:
        """Go on with the first `count` videos only."""
        for outputs in self.memory.values():
            for out in outputs.values():
                for key, value in out.items():
                    # Cloned, so that the memory of the others is freed.
                    out[key] = [part[:count].clone() for part in value] if key == "maskmem_pos_enc" else (
                        value[:count].clone()
                    )  # fmt: skip

    def memory_bytes(self) -> int:
        """Size of what is remembered of earlier frames."""
        found = 0
        for outputs in self.memory.values():
            for out in outputs.values():
                for value in out.values():
                    found += sum(part.nbytes for part in (value if isinstance(value, list) else [value]))
        return found


def group_episodes(lengths: Sequence[int], batch: int, pointers: int) -> list[list[int]]:
    """Episode numbers in groups of at most `batch`, each from the longest to the shortest, of similar length.

    Episodes shorter than `pointers` frames are in a group with others of the same length only.
    """
    order = sorted(range(len(lengths)), key=lambda episode: (-lengths[episode], episode))
    groups: list[list[int]] = []
    for episode in order:
        reach = min(lengths[episode], pointers)
        if groups and len(groups[-1]) < batch and min(lengths[groups[-1][0]], pointers) == reach:
            groups[-1].append(episode)
        else:
            groups.append([episode])
    return groups


def pack(logits: Tensor) -> Tensor:
    """Mask logits (B, H, W) to bit-packed masks of what is above zero, uint8 (B, H W / 8), most significant first."""
    bits = (logits > 0).flatten(1).unflatten(1, (-1, 8)).to(torch.uint8)
    return (bits << torch.arange(7, -1, -1, dtype=torch.uint8, device=logits.device)).sum(-1, dtype=torch.uint8)


@torch.inference_mode()
def segment_episodes(
    predictor: SAM2VideoPredictor,
    episodes: Sequence[np.ndarray],
    box: Sequence[float],
    batch: int,
    tick: Callable[[int], None] = lambda frames: None,
) -> list[np.ndarray]:
    """Masks of the object in `box` in every frame of every episode.

    Args:
        episodes: uint8 (L, H, W, 3) each, of one size; memory maps are read a few frames at a time.
        box: (x0, y0, x1, y1) in pixels, in the first frames.
        batch: episodes that run side by side.
        tick: called after every step with the number of frames; an exception from it ends the work.

    Returns the bit-packed masks, uint8 (L, H W / 8) each.
    """
    lengths, device = [len(episode) for episode in episodes], predictor.device
    height, width = episodes[0].shape[1:3]
    masks = [np.empty(0, np.uint8)] * len(episodes)
    for group in group_episodes(lengths, batch, predictor.max_obj_ptrs_in_encoder):
        longest = lengths[group[0]]
        tracker = Tracker(predictor, box, (height, width), len(group), longest)
        # Masks stay on the device until the group is done, so that no step waits for a copy.
        packed = torch.zeros(len(group), longest, height * width // 8, dtype=torch.uint8, device=device)
        alive, chunk = len(group), torch.empty(0)
        for t in range(longest):
            running = sum(lengths[episode] > t for episode in group)
            if running < alive:
                alive = running
                tracker.keep(alive)
            if t % UPLOAD == 0:
                host = torch.zeros(alive, min(UPLOAD, longest - t), height, width, 3, dtype=torch.uint8)
                for row, episode in enumerate(group[:alive]):
                    part = episodes[episode][t : t + UPLOAD]
                    host[row, : len(part)] = torch.from_numpy(np.array(part))
                chunk = host.to(device)
            packed[:alive, t] = pack(tracker.step(chunk[:alive, t % UPLOAD]))
            tick(alive)
        for row, episode in enumerate(group):
            masks[episode] = packed[row, : lengths[episode]].cpu().numpy()
    return masks
