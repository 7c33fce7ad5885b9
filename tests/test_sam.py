"""The streamed, batched tracker against the package's own predictor, with the real networks and random weights."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from common import sam
from common.cli import UserError

sam2_video_predictor = pytest.importorskip("sam2.sam2_video_predictor", reason="sam2 is not installed")

from sam2.build_sam import HF_MODEL_ID_TO_FILENAMES, build_sam2_video_predictor  # noqa: E402
from sam2.modeling.sam2_base import NO_OBJ_SCORE  # noqa: E402

CPU = torch.device("cpu")
SIZE = 128  # pixels at which SAM sees a frame
BOX = (13.0, 24.0, 54.0, 50.0)
# The package says in every frame that its CUDA extension is missing.
pytestmark = pytest.mark.filterwarnings("ignore")


def scene(length: int, seed: int) -> np.ndarray:
    """Frames uint8 (length, 64, 64, 3): a square that moves over a texture."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    frames = np.stack([np.roll(texture, t, 1) for t in range(length)])
    for t, frame in enumerate(frames):
        frame[20 : 20 + 24, 10 + t % 20 : 34 + t % 20] = rng.integers(0, 256, 3)
    return frames


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Random weights for which the object is seen: untrained networks may say that there is none."""
    torch.manual_seed(0)
    state = sam.load_predictor("tiny", None, SIZE, CPU).state_dict()
    state["sam_mask_decoder.pred_obj_score_head.layers.2.bias"] += 1.0
    return state


@pytest.fixture(scope="module")
def package() -> nn.Module:
    """The package's predictor with its own settings."""
    size = [f"++model.image_size={SIZE}"]
    return build_sam2_video_predictor(
        "configs/sam2.1/sam2.1_hiera_t.yaml", None, device="cpu", hydra_overrides_extra=size
    )


def package_logits(package, weights, frames: np.ndarray, monkeypatch) -> torch.Tensor:
    """Logits (L, H, W) of init_state and propagate_in_video, with our pixels instead of JPEG's."""
    package.load_state_dict(weights)
    images = sam.prepare(torch.from_numpy(frames), SIZE)
    monkeypatch.setattr(sam2_video_predictor, "load_video_frames", lambda **_: (images, *frames.shape[1:3]))
    state = package.init_state("frames")
    package.add_new_points_or_box(state, 0, 1, box=np.array(BOX, np.float32))
    return torch.stack([logits[0, 0] for _, _, logits in package.propagate_in_video(state)])


def test_two_episodes_in_one_batch_equal_the_package_frame_by_frame(package, weights, monkeypatch):
    """And the tracker's memory matters, stops growing, and shrinks when an episode ends."""
    episodes = np.stack([scene(18, seed) for seed in (0, 1)])
    expected = torch.stack([package_logits(package, weights, frames, monkeypatch) for frames in episodes])
    assert (expected > NO_OBJ_SCORE / 2).all() and (expected.std((-1, -2)) > 0.02).all()  # masks, not "no object"
    assert (expected[0] - expected[1]).abs().max() > 0.05
    predictor = sam.load_predictor("tiny", weights, SIZE, CPU)
    tracker = sam.Tracker(predictor, BOX, (64, 64), 2, 18)
    memory = []
    for t in range(18):
        logits = tracker.step(torch.from_numpy(episodes[:, t]))
        torch.testing.assert_close(logits, expected[:, t], atol=1e-5, rtol=0)
        memory.append(sum(tensor.nbytes for tensor in tree_leaves(tracker.memory)))
    assert memory[0] < memory[5] < memory[12] and len(set(memory[15:])) == 1
    tracker.keep(1)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tree_leaves(tracker.memory)) == memory[-1] // 2
    forgetful = sam.Tracker(predictor, BOX, (64, 64), 2, 18)
    for t in range(5):
        logits = forgetful.step(torch.from_numpy(episodes[:, t]))
        forgetful.memory["non_cond_frame_outputs"].clear()
        assert ((logits - expected[:, t]).abs().amax((1, 2)) > 1e-3).all() == (t >= 2)


def test_episodes_of_other_lengths_equal_the_package_and_no_object_is_empty(package, weights, monkeypatch):
    """Lengths around the reach of memory and pointers; an object score near zero makes some masks vanish."""
    lengths = [3, 17, 6, 18, 6]
    episodes = [scene(length, 10 + seed) for seed, length in enumerate(lengths)]
    predictor = sam.load_predictor("tiny", weights, SIZE, CPU)
    scores = []
    hook = predictor.sam_mask_decoder.register_forward_hook(lambda *args: scores.append(args[2][3].item()))
    sam.segment_episodes(predictor, episodes[4:], BOX, batch=1)
    hook.remove()
    key = "sam_mask_decoder.pred_obj_score_head.layers.2.bias"
    state = weights | {key: weights[key] - float(np.median(scores))}
    predictor.load_state_dict(state)
    steps = []
    masks = sam.segment_episodes(predictor, episodes, BOX, batch=4, tick=steps.append)
    assert sum(steps) == sum(lengths)
    vanished = 0
    for frames, packed in zip(episodes, masks):
        logits = package_logits(package, state, frames, monkeypatch)
        expected = np.packbits((logits > 0).numpy().reshape(len(frames), -1), axis=1)
        vanished += int((~expected.any(1)).sum())
        certain = np.packbits((logits.abs() > 1e-4).numpy().reshape(len(frames), -1), axis=1)
        assert packed.shape == expected.shape
        assert not ((packed ^ expected) & certain).any()
    assert 0 < vanished < sum(lengths)


def test_frames_are_resized_as_the_package_resizes_them(tmp_path):
    """Within one level of PIL, whose bicubic filter works on whole numbers; PNG instead of the JPEG detour."""
    from sam2.utils.misc import _load_img_as_tensor

    frame = scene(1, 3)[0]
    Image.fromarray(frame).save(tmp_path / "0.png")
    expected, _, _ = _load_img_as_tensor(tmp_path / "0.png", 256)
    ours = sam.prepare(torch.from_numpy(frame[None]), 256)[0]
    ours = ours * torch.tensor(sam.STD)[:, None, None] + torch.tensor(sam.MEAN)[:, None, None]
    assert (ours - expected).abs().max() <= 1.01 / 255 and (ours - expected).abs().mean() < 0.1 / 255


def test_wrong_checkpoints_are_refused(weights, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"model": weights}, path)
    assert sam.read_checkpoint(path)[0].keys() == weights.keys()
    torch.save({"weights": 1}, path)
    with pytest.raises(UserError, match="expected is a file of weights"):
        sam.read_checkpoint(path)
    with pytest.raises(UserError, match=r"does not fit SAM 2\.1 small; choose the --model"):
        sam.load_predictor("small", weights, SIZE, CPU)
    older = {name: value for name, value in weights.items() if name != "no_obj_embed_spatial"}
    with pytest.raises(UserError, match="it may be one of SAM 2;"):
        sam.load_predictor("tiny", older, SIZE, CPU)


@pytest.mark.parametrize("model", sam.MODELS)
def test_without_a_network_the_error_names_the_file(model, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    config, name = HF_MODEL_ID_TO_FILENAMES[f"{sam.HUB}{model}"]
    assert "sam2.1" in config and name.startswith("sam2.1_hiera_")
    with pytest.raises(UserError, match=rf"get {name} from https://.* pass it: --checkpoint {name}"):
        sam.download_checkpoint(model)
