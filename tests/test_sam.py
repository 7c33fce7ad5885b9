"""The streamed, batched tracker against the package's own predictor, with the real networks and random weights."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from common import sam
from common.errors import UserError

sam2_video_predictor = pytest.importorskip("sam2.sam2_video_predictor", reason="sam2 is not installed")

from sam2.build_sam import build_sam2_video_predictor  # noqa: E402

CONFIG = "configs/sam2.1/sam2.1_hiera_t.yaml"
CPU = torch.device("cpu")
BOX = (13.0, 24.0, 54.0, 50.0)


def sam_no_object() -> float:
    """Between the logits of a mask and the one that stands for "no object"."""
    from sam2.modeling.sam2_base import NO_OBJ_SCORE

    return NO_OBJ_SCORE / 2


def scene(length: int, seed: int, size: int = 64) -> np.ndarray:
    """Frames uint8 (length, size, size, 3): a square that moves over a texture."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (8, 8, 3), np.uint8).repeat(size // 8, 0).repeat(size // 8, 1)
    frames = np.stack([np.roll(texture, t, 1) for t in range(length)])
    for t, frame in enumerate(frames):
        frame[20 : 20 + 24, 10 + t % 20 : 34 + t % 20] = rng.integers(0, 256, 3)
    return frames


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Random weights for which the object is seen: untrained networks may say that there is none."""
    torch.manual_seed(0)
    predictor = sam.load_predictor("tiny", None, 128, CPU)
    state = {name: value.clone() for name, value in predictor.state_dict().items()}
    state["sam_mask_decoder.pred_obj_score_head.layers.2.bias"] += 1.0
    return state


def package_logits(weights, frames: np.ndarray, size: int, monkeypatch) -> torch.Tensor:
    """Logits (L, H, W) of init_state and propagate_in_video, with our pixels instead of JPEG's."""
    predictor = build_sam2_video_predictor(
        CONFIG, None, device="cpu", hydra_overrides_extra=[f"++model.image_size={size}"]
    )
    predictor.load_state_dict(weights)
    images = sam.prepare(torch.from_numpy(frames), size)
    monkeypatch.setattr(sam2_video_predictor, "load_video_frames", lambda **_: (images, *frames.shape[1:3]))
    state = predictor.init_state("frames")
    predictor.add_new_points_or_box(state, 0, 1, box=np.array(BOX, np.float32))
    return torch.stack([logits[0, 0] for _, _, logits in predictor.propagate_in_video(state)])


def our_logits(weights, episodes: list[np.ndarray], size: int, forget: bool = False) -> torch.Tensor:
    """Logits (B, L, H, W) of the tracker with all episodes in one batch; forget: wipe recent memory in every step."""
    predictor = sam.load_predictor("tiny", weights, size, CPU)
    length = len(episodes[0])
    tracker = sam.Tracker(predictor, BOX, episodes[0].shape[1:3], len(episodes), length)
    found = []
    for t in range(length):
        found.append(tracker.step(torch.from_numpy(np.stack([frames[t] for frames in episodes]))))
        if forget:
            tracker.memory["non_cond_frame_outputs"].clear()
    return torch.stack(found, 1)


@pytest.mark.filterwarnings("ignore")  # the package says in every frame that its CUDA extension is missing
def test_two_episodes_in_one_batch_equal_the_package_frame_by_frame(weights, monkeypatch):
    episodes = [scene(24, seed) for seed in (0, 1)]
    expected = torch.stack([package_logits(weights, frames, 256, monkeypatch) for frames in episodes])
    assert expected.shape == (2, 24, 64, 64)
    assert (expected > sam_no_object()).all() and (expected.std((-1, -2)) > 0.02).all()  # masks, not "no object"
    assert (expected[0] - expected[1]).abs().max() > 0.05
    torch.testing.assert_close(our_logits(weights, episodes, 256), expected, atol=1e-5, rtol=0)


def test_logits_depend_on_the_memory(weights):
    """What the equality test would not notice if memory did nothing in a random network."""
    episodes = [scene(20, seed) for seed in (0, 1)]
    whole, forgotten = our_logits(weights, episodes, 128), our_logits(weights, episodes, 128, forget=True)
    assert torch.equal(whole[:, :2], forgotten[:, :2])
    assert (whole[:, 2:] - forgotten[:, 2:]).abs().amax((0, 2, 3)).min() > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_episodes_of_other_lengths_equal_the_package_and_no_object_is_empty(weights, monkeypatch):
    """Lengths around the reach of memory and pointers; an object score near zero makes some masks vanish."""
    state = dict(weights)
    lengths = [3, 18, 9, 17, 22, 9]
    episodes = [scene(length, 10 + seed) for seed, length in enumerate(lengths)]
    predictor = sam.load_predictor("tiny", state, 128, CPU)
    tracker = sam.Tracker(predictor, BOX, (64, 64), 1, 22)
    scores = []
    hook = predictor.sam_mask_decoder.register_forward_hook(lambda *args: scores.append(args[2][3].item()))
    for frame in episodes[4]:
        tracker.step(torch.from_numpy(frame[None].copy()))
    hook.remove()
    key = "sam_mask_decoder.pred_obj_score_head.layers.2.bias"
    state[key] = state[key] - float(np.median(scores))
    predictor.load_state_dict(state)
    monkeypatch.setattr(sam, "UPLOAD", 4)  # several uploads in an episode
    masks = sam.segment_episodes(predictor, episodes, BOX, batch=4)
    vanished = 0
    for frames, packed in zip(episodes, masks):
        logits = package_logits(state, frames, 128, monkeypatch)
        expected = np.packbits((logits > 0).numpy().reshape(len(frames), -1), axis=1)
        vanished += int((~expected.any(1)).sum())
        certain = np.packbits((logits.abs() > 1e-4).numpy().reshape(len(frames), -1), axis=1)
        assert packed.shape == expected.shape
        assert not ((packed ^ expected) & certain).any()
    assert 0 < vanished < sum(lengths)


def test_memory_of_the_tracker_stops_growing(weights):
    predictor = sam.load_predictor("tiny", weights, 128, CPU)
    tracker = sam.Tracker(predictor, BOX, (64, 64), 2, 45)
    sizes = []
    for frame in scene(45, 0):
        tracker.step(torch.from_numpy(np.stack([frame, frame])))
        sizes.append(tracker.memory_bytes())
    assert sizes[0] < sizes[5] < sizes[12]
    assert len(set(sizes[15:])) == 1
    tracker.keep(1)
    assert tracker.memory_bytes() == sizes[-1] // 2


def test_frames_are_resized_as_the_package_resizes_them(tmp_path):
    """Within one level of PIL, whose bicubic filter works on whole numbers; PNG instead of the JPEG detour."""
    from sam2.utils.misc import _load_img_as_tensor

    frame = scene(1, 3)[0]
    Image.fromarray(frame).save(tmp_path / "0.png")
    expected, height, width = _load_img_as_tensor(tmp_path / "0.png", 256)
    assert (height, width) == (64, 64)
    ours = sam.prepare(torch.from_numpy(frame[None]), 256)[0]
    ours = ours * torch.tensor(sam.STD)[:, None, None] + torch.tensor(sam.MEAN)[:, None, None]
    assert (ours - expected).abs().max() <= 1.01 / 255
    assert (ours - expected).abs().mean() < 0.1 / 255


def test_groups_hold_every_episode_once_and_keep_short_ones_apart():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(2, 40, rng.integers(1, 30)).tolist()
        groups = sam.group_episodes(lengths, 4, 16)
        assert sorted(episode for group in groups for episode in group) == list(range(len(lengths)))
        for group in groups:
            own = [lengths[episode] for episode in group]
            assert len(group) <= 4 and own == sorted(own, reverse=True)
            assert len({min(length, 16) for length in own}) == 1
    assert sam.group_episodes([1001] * 5, 2, 16) == [[0, 1], [2, 3], [4]]


def test_packing_equals_numpy():
    logits = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0))
    expected = np.packbits((logits > 0).numpy().reshape(3, -1), axis=1)
    assert np.array_equal(sam.pack(logits).numpy(), expected)


def test_wrong_checkpoints_are_refused(weights, tmp_path):
    path = tmp_path / "weights.pt"
    with pytest.raises(UserError, match="no such file"):
        sam.read_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a checkpoint of torch"):
        sam.read_checkpoint(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="not a checkpoint of torch"):
        sam.read_checkpoint(path)
    torch.save({"model": weights}, path)
    assert sam.read_checkpoint(path).keys() == weights.keys()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a checkpoint of torch, or damaged"):
        sam.read_checkpoint(path)
    torch.save({"weights": 1}, path)
    with pytest.raises(UserError, match="holds no 'model'"):
        sam.read_checkpoint(path)
    with pytest.raises(UserError, match=r"does not fit SAM 2\.1 small: \d+ weights are missing.*choose the --model"):
        sam.load_predictor("small", weights, 128, CPU)
    older = {name: value for name, value in weights.items() if name != "no_obj_embed_spatial"}
    with pytest.raises(UserError, match="it may be one of SAM 2;"):
        sam.load_predictor("tiny", older, 128, CPU)


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_a_network_the_error_names_the_file(environment, tmp_path):
    """In a process of its own: the hub's client reads its environment when it is imported."""
    import os

    code = "from common.sam import find_checkpoint\nfind_checkpoint('tiny')"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": "."} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = found.stderr.strip().splitlines()[-1]
    assert "UserError" in last and "sam2.1_hiera_tiny.pt" in last and "--checkpoint" in last


@pytest.mark.parametrize("model", sam.MODELS)
def test_every_size_is_in_the_package(model):
    from sam2.build_sam import HF_MODEL_ID_TO_FILENAMES

    config, name = HF_MODEL_ID_TO_FILENAMES[sam.MODELS[model]]
    assert "sam2.1" in config and "sam2.1" in name
