"""LAPO-Slots: VideoSAUR, features of DINOv2, slots of single frames, probing, the agent's slot, latent actions."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import torch
from methods import CPU, attach_planted_slots, build, double_precision, lam_sampler, lam_training, pair_nmse
from torch import Tensor, nn

import lapo_slots
from common import runs, slots
from common.cli import UserError
from common.dataset import Dataset, Sampler, TensorSampler, sequential
from common.dino import FeatureSampler, load_dino
from common.weights import weights_hash

VIT = "vit_small_patch14_dinov2"
GOLDEN = Path(__file__).with_name("golden_losses.json")


def video_saur(
    patches: int = 9, dim: int = 10, seed: int = 0, **changes
) -> tuple[lapo_slots.Args, lapo_slots.VideoSaur]:
    args = lapo_slots.Args(**({"slot_dim": 8, "renderer_dim": 16} | changes))
    torch.manual_seed(seed)
    return args, lapo_slots.VideoSaur(args, patches, dim).apply(lapo_slots.orthogonal_init)


def test_parameter_count() -> None:
    """Counted by hand, layer by layer, at the paper's size: ViT-B/14 at 224 pixels, four slots of 128."""
    model = lapo_slots.VideoSaur(lapo_slots.Args(), 256, 768)
    assert sum(p.numel() for p in model.parameters()) == 5_668_992


def test_gru_cell_is_torchs() -> None:
    torch.manual_seed(0)
    cell, reference = slots.GRUCell(6), nn.GRUCell(6, 6)
    for own, name in ((cell.from_input, "ih"), (cell.from_state, "hh")):
        own.weight.data, own.bias.data = getattr(reference, f"weight_{name}"), getattr(reference, f"bias_{name}")
    x, state = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    expected = reference(x.flatten(0, 1), state.flatten(0, 1)).view(2, 5, 6)
    torch.testing.assert_close(cell(x, state), expected)


def test_permuting_the_initial_slots_permutes_the_slots_and_leaves_the_decoding() -> None:
    _, model = video_saur()
    clips, order = torch.randn(3, 4, 9, 10), torch.tensor([2, 0, 3, 1])
    found, attention = model.extract(clips[:, 0])
    decoded, logits = model(clips)
    assert found.shape == (3, 4, 8) and decoded.shape == (3, 4, 9, 10) and logits.shape == (3, 4, 9, 9)
    torch.testing.assert_close(attention.sum(1), torch.ones(3, 9))  # the slots share each patch
    model.initial.data = model.initial.data[order]
    permuted, permuted_attention = model.extract(clips[:, 0])
    torch.testing.assert_close(permuted, found[:, order])
    torch.testing.assert_close(permuted_attention, attention[:, order])
    assert (found - permuted).abs().max() > 0.01
    torch.testing.assert_close(model(clips), (decoded, logits))


def test_clips_start_like_single_frames_and_then_go_on_from_the_predictor() -> None:
    _, model = video_saur()
    clips = torch.randn(2, 4, 9, 10)
    decoded = torch.cat(model(clips), dim=-1)
    first, _ = model.extract(clips[:, 0])
    second, _ = model.attention(model.predictor(first), model.project(clips[:, 1]))
    torch.testing.assert_close(model.decoder(first), decoded[:, 0])
    torch.testing.assert_close(model.decoder(second), decoded[:, 1])
    assert (model.extract(clips[:, 1])[0] - second).abs().max() > 1e-3


def naive_similarity(keys: np.ndarray, temperature: float) -> np.ndarray:
    """VideoSAUR's target, one pair of patches at a time."""
    clips, frames, patches, _ = keys.shape
    target = np.zeros((clips, frames - 1, patches, patches))
    for b, t, i in np.ndindex(*target.shape[:3]):
        row = []
        for j in range(patches):
            a, c = keys[b, t, i], keys[b, t + 1, j]
            cosine = float(a @ c) / math.sqrt(float(a @ a) * float(c @ c))
            row.append(math.exp(cosine / temperature) if cosine >= 0 else 0.0)
        target[b, t, i] = np.array(row) / sum(row) if sum(row) else 1 / patches
    return target


def test_slot_loss_against_naive_loops() -> None:
    args, model = video_saur()
    extra = torch.randn(2, 4, 9, 20)
    extra[1, 1, 2, 10:] = torch.eye(10)[0]  # the key of a patch that is unlike every patch of the next frame
    extra[1, 2, :, 10] = -extra[1, 2, :, 10].abs()
    features, keys = extra.double().numpy()[..., :10], extra.double().numpy()[..., 10:]
    expected = naive_similarity(keys, 0.075)
    target = lapo_slots.temporal_similarity(torch.from_numpy(keys), 0.075).numpy()
    np.testing.assert_allclose(target, expected, rtol=1e-6, atol=1e-12)
    assert np.allclose(target[1, 1, 2], 1 / 9) and (target == 0).any()
    loss, z, logs = lapo_slots.slot_loss(model, SimpleNamespace(extra=extra), args)
    with torch.no_grad():
        decoded, logits = (part.double().numpy() for part in model(extra[..., :10]))
    entropy = []
    for index in np.ndindex(2, 3, 9):
        row = logits[index]
        entropy.append(sum(-p * (x - math.log(sum(np.exp(row)))) for p, x in zip(expected[index], row)))
    assert z is None
    assert logs["feature"].item() == pytest.approx(((decoded - features) ** 2).mean(), rel=1e-4)
    assert logs["similarity"].item() == pytest.approx(np.mean(entropy), rel=1e-4)
    assert loss.item() == pytest.approx(logs["feature"].item() + 0.1 * logs["similarity"].item(), rel=1e-6)


def test_lam_loss_by_hand(train_set: Dataset) -> None:
    """The IDM sees the slot at t and at t + k, the FDM the first and z; the error is that of the second."""
    module, args, model = build("lapo_slots")
    sampler = lam_sampler("lapo_slots", args, train_set)
    batch = sampler.next()
    sampler.close()
    loss, z, _ = module.lam_loss(model, batch, args)
    now, later = batch.extra.float().unbind(1)
    torch.testing.assert_close(z, model.idm(torch.cat([now, later], 1)))
    predicted = model.fdm(torch.cat([now, z], 1))
    assert loss.item() == pytest.approx(((predicted - later) ** 2).mean().item())
    assert batch.frames is None and torch.equal(module.encode(model, batch, args), z)


def test_slots_of_a_transition_stay_in_the_episode(tmp_path: Path) -> None:
    """The slot at t and at t + 10 or the episode's last, against a naive loop, across shards."""
    data = Dataset(planted.write(tmp_path, train=5, lengths=(3, 14, 6), shards=2), "cheetah-run", "train")
    table = torch.arange(data.num_frames * 4).view(-1, 4).half()
    slots.attach_slot(data, table, 1, 10)
    seen = []
    for batch in sequential(data, 7, max_offset=1, device=CPU, fields=("slots",)):
        assert batch.frames is None
        for t, pair in zip(batch.index.tolist(), batch.extra):
            last = data.episode_start[data.episode_of_frame[t] + 1] - 1
            assert torch.equal(pair, table[[t, min(t + 10, last)]])
            seen.append(t)
    assert seen == data.transitions.tolist()


def test_dino_gives_the_last_blocks_output_and_keys(capsys) -> None:
    """Against a pass through timm's network by hand; random weights are the same each time and leave the run's seed."""
    torch.manual_seed(5)
    network = load_dino(VIT, None, True, 28)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3)) and "random weights" in capsys.readouterr().out
    assert weights_hash(network.vit.state_dict()) == weights_hash(load_dino(VIT, None, True, 28).vit.state_dict())
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16, 3), np.uint8))
    features = network(frames)
    assert features.shape == (2, 3, network.patches, 2 * network.dim) == (2, 3, 4, 768)
    vit, last = network.vit, network.vit.blocks[-1]
    image = torch.nn.functional.interpolate(frames[0].movedim(-1, 1) / 255, size=(28, 28), mode="bilinear")
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = vit._pos_embed(vit.patch_embed((image - mean) / std))
    for block in vit.blocks[:-1]:
        x = block(x)
    keys = last.attn.qkv(last.norm1(x)).unflatten(2, (3, 384))[:, 1:, 1]
    torch.testing.assert_close(features[0], torch.cat([last(x)[:, 1:], keys], -1), rtol=1e-4, atol=1e-4)


def test_slots_are_trained_on_features_of_a_network_that_stays(planted_dir: Path) -> None:
    """Batches of clips have the features of their own frames; gradients reach the slots only."""
    data = Dataset(planted_dir, "cheetah-run", "train")
    network = load_dino(VIT, None, True, 28)
    clips = Sampler(data, 4, max_offset=1, seed=3, device=CPU)
    sampler = FeatureSampler(clips, network)
    batch = sampler.next()
    sampler.close()
    t = batch.index.numpy()
    first = data.episode_start[data.episode_of_frame[t]]
    index = np.maximum(t[:, None] + np.arange(-2, 2), first[:, None])
    torch.testing.assert_close(batch.extra, network(torch.from_numpy(data.frames(index))), rtol=1e-4, atol=1e-4)
    args, model = video_saur(network.patches, network.dim)
    lapo_slots.slot_loss(model, batch, args)[0].backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    assert all(weight.grad is None for weight in network.parameters())
    assert sampler.batches_per_epoch == clips.batches_per_epoch and sampler.batch_size == 4


def test_checkpoints(tmp_path: Path) -> None:
    """Files of timm and of DINOv2's authors, whose positions are for 518 pixels."""
    import safetensors.torch
    import timm

    original = timm.create_model(VIT, pretrained=False, num_classes=0).state_dict()
    safetensors.torch.save_file(original, tmp_path / "timm.safetensors")
    torch.save(original | {"mask_token": torch.zeros(1, 384)}, tmp_path / "authors.pth")
    loaded = [load_dino(VIT, tmp_path / name, False, 28).vit for name in ("timm.safetensors", "authors.pth")]
    assert weights_hash(loaded[0].state_dict()) == weights_hash(loaded[1].state_dict())
    assert torch.equal(loaded[0].blocks[3].mlp.fc1.weight, original["blocks.3.mlp.fc1.weight"])
    assert loaded[0].pos_embed.shape == (1, 5, 384)
    with pytest.raises(UserError, match="not the weights of vit_small_patch14_reg4_dinov2"):
        load_dino("vit_small_patch14_reg4_dinov2", tmp_path / "authors.pth", False, 28)


def test_networks_and_sizes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    for name, random in (("vit_nothing", False), ("resnet18", False), ("mixer_s16_224", True)):
        with pytest.raises(UserError, match=f"--dino-model {name}"):
            load_dino(name, None, random, 224)
    with pytest.raises(UserError, match="--dino-image-size is 30, must be a multiple of 14"):
        load_dino(VIT, None, True, 30)
    with pytest.raises(UserError, match="--slot-dim is 6, must be a multiple of 4"):
        lapo_slots.Args(slot_dim=6)
    with pytest.raises(UserError, match="exclude each other"):
        load_dino(VIT, Path("weights.pth"), True, 28)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"timm/vit_small_patch14_dinov2.lvd142m.*--dino-checkpoint FILE"):
        load_dino(f"{VIT}.lvd142m", None, False, 28)


def test_probing_finds_the_slot_that_knows_the_action(tmp_path: Path) -> None:
    """Scores against scikit-learn by hand; whole episodes are held out."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression

    lengths = (28, 34, 26, 32, 36, 24, 30)
    data = Dataset(planted.write(tmp_path, train=7, lengths=lengths), "cheetah-run", "train")
    labelled, rng = data.labelled(150, seed=2), np.random.default_rng(0)
    values = rng.standard_normal((150, 3, 12)).astype(np.float32)
    values[:, 1] *= np.linspace(0.1, 3, 12)
    actions = data.action[labelled].clip(-1, 1)
    values[:, 2, :6] = 0.2 * values[:, 2, :6] + 2 * actions
    scores = slots.probe_slots(torch.from_numpy(values), data, labelled, components=5, folds=5)
    assert [score["slot"] for score in scores] == [1, 2, 3]
    assert scores[2]["nmse"] < 0.5 < 0.9 < min(scores[0]["nmse"], scores[1]["nmse"])
    episode, errors = data.episode_of_frame[labelled], []
    for held_out in np.unique(episode):  # five labelled episodes, so one is a fold
        test = episode == held_out
        pca = PCA(5).fit(values[~test, 1])
        probe = LinearRegression().fit(pca.transform(values[~test, 1]), actions[~test])
        errors.append((probe.predict(pca.transform(values[test, 1])) - actions[test]) ** 2)
    variance = actions.var(0).mean()
    assert len(errors) == 5 and scores[1]["nmse"] == pytest.approx(np.concatenate(errors).mean() / variance, rel=1e-4)
    each = sorted(error.mean() / variance for error in errors)
    assert sorted(scores[1]["nmse_per_fold"]) == pytest.approx(each, rel=1e-4)
    few = slots.probe_slots(torch.from_numpy(values[:40]), data, data.labelled(40, seed=2), components=32, folds=5)
    assert len(few[0]["nmse_per_fold"]) == 2  # two episodes
    with pytest.raises(UserError, match=r"one episode.*--num-labels"):
        slots.check_labelled(data, data.labelled(20, seed=2))


def test_agent_report_by_hand(train_set: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots on a grid of 2 x 2 patches, 32 x 32 pixels; enlarged without blending so that areas are exact."""

    def blocks(attention: Tensor, size: int) -> Tensor:
        return attention.unflatten(-1, (2, 2)).repeat_interleave(16, -1).repeat_interleave(16, -2)

    monkeypatch.setattr(slots, "enlarge", blocks)
    left, quarter = np.zeros((2, 32, 32), bool)
    left[:, :16] = True
    quarter[:16, :16] = True
    masks = [left, quarter, np.zeros((32, 32), bool), ~left]
    index = np.array([0, 1, 2, 3])
    monkeypatch.setattr(train_set, "masks", lambda rows: np.stack([np.packbits(masks[row]) for row in rows]))
    halves = torch.tensor([[0.9, 0.2, 0.8, 0.3], [0.1, 0.8, 0.2, 0.7]])  # the first slot has the left half
    report = slots.agent_report(halves.expand(4, 2, 4), train_set, index)
    assert report["frames"] == 3  # one has no mask
    assert report["iou"] == pytest.approx([(1 + 0.5 + 0) / 3, (0 + 0 + 1) / 3])
    assert report["share"] == pytest.approx([2 / 3, 1 / 3]) and report["best_iou"] == pytest.approx(2.5 / 3)
    assert report["changes"] == 0.0  # of the pair 0, 1; frame 2 is in no pair
    swapped = torch.stack([halves, halves.flip(0), halves, halves])
    assert slots.agent_report(swapped, train_set, index)["changes"] == 1.0
    monkeypatch.setattr(train_set, "masks", lambda rows: np.zeros((len(rows), 128), np.uint8))
    assert slots.agent_report(swapped, train_set, index)["iou"] is None


def train_slots(args, model, features: Tensor, runs_dir: Path, batch_size: int, updates: int, rate: float) -> list:
    """Trains stage 1 on clips (N, T, patches, 2 F). Returns the loss of each update."""
    args.runs_dir, args.log_every = runs_dir, 1
    run = runs.Run(args, "lapo_slots", f"{updates} updates", {})
    clips = TensorSampler({"extra": features}, batch_size, seed=0, episode=np.arange(len(features)))

    def loss(model: nn.Module, batch: dict[str, Tensor], args: lapo_slots.Args) -> tuple:
        return lapo_slots.slot_loss(model, SimpleNamespace(**batch), args)

    lapo_slots.train(run, args, "slots", model, loss, clips, updates, rate, args.slot_clip)
    losses = [line["slots/loss"] for line in runs.read_metrics(run.dir)]
    run.close()
    return losses


def squares(rng: np.random.Generator, clips: int, frames: int, side: int = 6) -> tuple[Tensor, Tensor]:
    """Clips of coloured squares that move and bounce, as their patches' colours and positions (clips, frames, N, 9).

    Also the mask of the agent, the red one: bool (clips, frames, N).
    """
    colours = 2 * np.array([[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])  # of background, agent, two others
    order, size = np.array([2, 3, 1]), np.array([[2], [2], [3]])  # the last one is in front
    place, speed = rng.uniform(0, side - size, (clips, 3, 2)), rng.uniform(-1, 1, (clips, 3, 2))
    shown = np.zeros((clips, frames, side, side), int)
    for frame in range(frames):
        for clip, number in np.ndindex(clips, 3):
            y, x = np.round(place[clip, number]).astype(int)
            shown[clip, frame, y : y + size[number, 0], x : x + size[number, 0]] = order[number]
        speed = np.where((place + speed < 0) | (place + speed > side - size), -speed, speed)
        place = np.clip(place + speed, 0, side - size)
    pixels = colours[shown] + 0.1 * rng.standard_normal((*shown.shape, 3))
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-1, 1, side)], indexing="ij"), -1)
    position = 0.2 * np.concatenate([grid, np.sin(3 * grid), np.cos(3 * grid)], -1)
    features = np.concatenate([pixels, np.broadcast_to(position, (*shown.shape, 6))], -1)
    return torch.from_numpy(features).flatten(2, 3), torch.from_numpy(shown == 1).flatten(2)


def constancy(attention: Tensor, mask: Tensor) -> float:
    """The largest share of frames in which the same slot's patches overlap the agent's most."""
    belongs = attention.argmax(1)[:, None] == torch.arange(attention.shape[1])[:, None]  # (frames, K, N)
    agent = mask.flatten(0, 1)[:, None]
    best = ((belongs & agent).sum(2) / (belongs | agent).sum(2)).nan_to_num().argmax(1)
    return (best.bincount().max() / len(best)).item()


def test_the_same_slot_follows_the_agent(tmp_path: Path) -> None:
    """Moving coloured squares, five seeds: one slot has the agent in all held-out clips, over 20 frames each.

    All frames start from the same slots; where each starts from them in another order, it does not.
    """
    same, shuffled = [], []
    for seed in range(1, 6):
        rng = np.random.default_rng(seed)
        features, _ = squares(rng, 100, 4)
        held_out, mask = squares(rng, 32, 20)
        with double_precision():
            args, model = video_saur(patches=36, dim=9, seed=seed, slot_dim=32, renderer_dim=64, slot_warmup=50)
            losses = train_slots(args, model, features.repeat(1, 1, 1, 2), tmp_path / str(seed), 8, 100, 2e-3)
            with torch.no_grad():
                frames = held_out.flatten(0, 1)
                orders = torch.rand(len(frames), 4).argsort(1)
                same.append(constancy(model.extract(frames)[1], mask))
                shuffled.append(constancy(model.attention(model.initial[orders], model.project(frames))[1], mask))
        assert np.mean(losses[-10:]) < 0.6 * losses[0]
    assert min(same) > 0.5 > 1.5 * max(shuffled) and np.median(same) > 0.95, (same, shuffled)


def golden_slots(runs_dir: Path) -> list[float]:
    """Losses of ten updates of stage 1 from a fixed seed, on seeded random features."""
    with double_precision():
        args, model = video_saur(slot_warmup=2)
        clips = torch.randn(16, 4, 9, 20, generator=torch.Generator().manual_seed(0))
        return train_slots(args, model, clips, runs_dir, batch_size=4, updates=10, rate=1e-2)


def test_golden_losses_of_the_slots(tmp_path: Path) -> None:
    """A pure refactoring must reproduce them. Remake: python tests/test_lapo_slots.py."""
    golden = json.loads(GOLDEN.read_text())["lapo_slots, slots"]
    torch.testing.assert_close(golden_slots(tmp_path), golden, rtol=1e-6, atol=0)


def test_latent_actions_of_a_slot_that_follows_the_agent(tmp_path: Path) -> None:
    """Stage 3 on a slot that knows where the planted square is: z tells the action well, better than untrained."""
    data = planted.write(tmp_path / "data", train=40, test=8, length=50, size=16, action_dim=2)
    module, args, model = build(
        "lapo_slots", size=16, batch_size=32, lam_lr=1e-3, offset=1, runs_dir=tmp_path, num_slots=2
    )
    slots_of = partial(attach_planted_slots, args=args)
    untrained = pair_nmse(module, args, model, data, slots_of)
    trained = pair_nmse(module, args, lam_training(module, args, model, data, 600), data, slots_of)
    assert trained < 0.6 * untrained, (trained, untrained)


if __name__ == "__main__":  # writes the golden losses of stage 1 anew
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        losses = json.loads(GOLDEN.read_text()) | {"lapo_slots, slots": golden_slots(Path(folder))}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
