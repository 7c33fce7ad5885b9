"""LAPO-Slots: VideoSAUR, features of DINOv2, slots of single frames, probing, the agent's slot, latent actions."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import torch
from methods import CPU, attach_planted_slots, build, lam_sampler, lam_training
from torch import Tensor, nn

import lapo_slots
from common import evaluation, runs, slots
from common.dataset import Dataset, Sampler, sequential
from common.dino import FeatureSampler, load_dino
from common.errors import UserError
from common.weights import weights_hash

VIT = "vit_small_patch14_dinov2"
GOLDEN = Path(__file__).with_name("golden_losses.json")


def video_saur(
    patches: int = 9, dim: int = 10, seed: int = 0, **changes
) -> tuple[lapo_slots.Args, lapo_slots.VideoSaur]:
    args = lapo_slots.Args(**({"slot_dim": 8, "renderer_dim": 16} | changes))
    torch.manual_seed(seed)
    return args, lapo_slots.VideoSaur(args, patches, dim).apply(lapo_slots.orthogonal_init)


# --- networks


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + bias * outputs


def test_parameter_counts() -> None:
    """Against counts by hand, at the paper's size: ViT-B/14 at 224 pixels, four slots of 128."""
    args, d, features, patches = lapo_slots.Args(), 128, 768, 256
    model = lapo_slots.VideoSaur(args, patches, features)
    norm = 2 * d
    block = 2 * norm + linear(d, 3 * d) + linear(d, d) + linear(d, 4 * d) + linear(4 * d, d)
    project = 2 * features + linear(features, 2 * features) + linear(2 * features, d)
    attention = 2 * norm + 3 * linear(d, d, bias=False) + 2 * (3 * d * d + 3 * d)
    mixer = patches * d + 3 * norm + 3 * block + 2 * linear(d, d, bias=False)
    mixer += linear(d, 1024) + 2 * linear(1024, 1024) + linear(1024, features + patches)
    assert sum(p.numel() for p in model.parameters()) == 4 * d + project + attention + block + mixer
    lam = lapo_slots.LatentActionModel(args, 64, 6)
    blocks = 3 * (2 * 1024 + 2 * linear(1024, 1024))
    assert sum(p.numel() for p in lam.idm.parameters()) == linear(2 * d, 1024) + blocks + linear(1024, 128)
    assert sum(p.numel() for p in lam.fdm.parameters()) == linear(d + 128, 1024) + blocks + linear(1024, d)
    prediction, z = lam(torch.zeros(3, 2, d))
    assert prediction.shape == (3, d) and z.shape == (3, 128)


def test_defaults_follow_the_papers_table() -> None:
    dcs, dmw = lapo_slots.defaults(["--env", "walker-run"]), lapo_slots.defaults(["--env=reach"])
    for args, batch, epochs, rate, count in ((dcs, 256, 1, 3e-4, 4), (dmw, 128, 4, 1.5e-4, 3)):
        assert (args.batch_size, args.lam_epochs, args.policy_epochs, args.num_slots) == (batch, epochs, epochs, count)
        assert (args.lam_lr, args.policy_lr, args.decoder_lr, args.slot_lr) == (rate, rate, 1e-3, 3e-4)
        assert (args.slot_updates, args.slot_warmup, args.slot_clip, args.slot_iterations) == (25_000, 1250, 0.05, 3)
        assert (args.lam_clip, args.policy_clip, args.decoder_clip, args.decoder_updates) == (1.0, 1.0, None, 25_000)
        assert (args.slot_dim, args.similarity_weight, args.similarity_temperature) == (128, 0.1, 0.075)
        assert (args.pca_components, args.probe_folds, args.offset, args.policy_scale) == (32, 5, 10, 4)
        assert (args.lam_dim, args.lam_blocks, args.latent_dim, args.decoder_dim) == (1024, 3, 128, 256)
        assert (args.dino_model, args.dino_weights) == ("vit_base_patch14_dinov2.lvd142m", "pretrained")


def test_bad_values_are_refused() -> None:
    for changes, message in (
        ({"slot_dim": 6}, "multiple of 4"),
        ({"similarity_temperature": 0.0}, "above 0"),
        ({"num_slots": 1}, "--num-slots is 1, must be at least 2"),
        ({"offset": 0}, "--offset is 0"),
    ):
        with pytest.raises(UserError, match=message):
            lapo_slots.Args(**changes)


def test_schedule() -> None:
    """Linear warm-up, then exponential decay to a half; constant in the other stages."""
    args = lapo_slots.Args()
    rates = [lapo_slots.schedule(args, "slots", step, 25_000, 100) for step in (0, 625, 1250, 13_125, 25_000)]
    assert rates == pytest.approx([0, 0.5, 1, math.sqrt(0.5), 0.5])
    assert {lapo_slots.schedule(args, stage, 7, 10, 5) for stage in ("lam", "policy", "decoder")} == {1.0}
    assert lapo_slots.schedule(args, "slots", 5, 10, 5) == 1.0  # a short run warms up for half of it


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
    """A clip's first frame is decoded from its slots alone, the second from what the predictor makes of the first."""
    _, model = video_saur()
    clips = torch.randn(2, 4, 9, 10)
    decoded = torch.cat(model(clips), dim=-1)
    first, _ = model.extract(clips[:, 0])
    torch.testing.assert_close(model.decoder(first), decoded[:, 0])
    second, _ = model.attention(model.predictor(first), model.project(clips[:, 1]))
    torch.testing.assert_close(model.decoder(second), decoded[:, 1])
    alone, _ = model.extract(clips[:, 1])
    assert (alone - second).abs().max() > 1e-3


# --- losses


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
    attach_planted_slots(data, lapo_slots.Args(slot_dim=4, num_slots=2))
    table = data.extra("slots", np.arange(data.num_frames))
    seen = []
    for batch in sequential(data, 7, max_offset=1, device=CPU):
        assert batch.frames is None
        for t, pair in zip(batch.index.tolist(), batch.extra.numpy()):
            last = data.episode_start[data.episode_of_frame[t] + 1] - 1
            assert np.array_equal(pair, table[[t, min(t + 10, last)]])
            seen.append(t)
    assert seen == data.transitions.tolist()
    stack = next(sequential(data, 4, max_offset=0, device=CPU))
    assert stack.extra is None and stack.frames.shape[:2] == (4, 3)  # what a policy sees


# --- features


def test_dino_gives_the_last_blocks_output_and_keys() -> None:
    """Against a pass through timm's network by hand."""
    network = load_dino(VIT, None, True, 28)
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16, 3), np.uint8))
    features = network(frames)
    assert features.shape == (2, 3, network.patches, 2 * network.dim) == (2, 3, 4, 768)
    vit = network.vit
    image = torch.nn.functional.interpolate(frames[0].movedim(-1, 1) / 255, size=(28, 28), mode="bilinear")
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed((image - mean) / std))))
    for block in vit.blocks[:-1]:
        x = block(x)
    last = vit.blocks[-1]
    keys = last.attn.qkv(last.norm1(x)).unflatten(2, (3, 384))[:, 1:, 1]
    torch.testing.assert_close(features[0, :, :, :384], last(x)[:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features[0, :, :, 384:], keys, rtol=1e-4, atol=1e-4)


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


def test_random_weights_are_always_the_same_and_leave_the_runs_random_numbers(capsys) -> None:
    torch.manual_seed(5)
    hashes = [weights_hash(load_dino(VIT, None, True, 28).vit.state_dict()) for _ in range(2)]
    after = torch.rand(3)
    torch.manual_seed(5)
    assert hashes[0] == hashes[1] and torch.equal(after, torch.rand(3))
    assert "random weights" in capsys.readouterr().out


def test_checkpoints(tmp_path: Path) -> None:
    """Files of timm and of DINOv2's authors, whose positions are for 518 pixels; errors name the file."""
    import safetensors.torch
    import timm

    original = timm.create_model(VIT, pretrained=False, num_classes=0).state_dict()
    safetensors.torch.save_file(original, tmp_path / "timm.safetensors")
    torch.save(original | {"mask_token": torch.zeros(1, 384)}, tmp_path / "authors.pth")
    loaded = [load_dino(VIT, tmp_path / name, False, 28).vit for name in ("timm.safetensors", "authors.pth")]
    assert weights_hash(loaded[0]) == weights_hash(loaded[1])
    assert torch.equal(loaded[0].blocks[3].mlp.fc1.weight, original["blocks.3.mlp.fc1.weight"])
    assert loaded[0].pos_embed.shape == (1, 5, 384)
    (tmp_path / "noise.pth").write_bytes(b"not weights")
    (tmp_path / "noise.safetensors").write_bytes(b"not weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for name, message in (
        ("noise.pth", "not a readable file"),
        ("noise.safetensors", "not a readable file"),
        ("list.pth", "no plain dictionary"),
        ("missing.pth", "no such file"),
    ):
        with pytest.raises(UserError, match=rf"--dino-checkpoint .*{name}: .*{message}"):
            load_dino(VIT, tmp_path / name, False, 28)
    with pytest.raises(UserError, match="not the weights of vit_small_patch14_reg4_dinov2"):
        load_dino("vit_small_patch14_reg4_dinov2", tmp_path / "authors.pth", False, 28)


def test_networks_and_sizes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    for name, random in (("vit_nothing", False), ("resnet18", False), ("mixer_s16_224", True)):
        with pytest.raises(UserError, match=f"--dino-model {name}"):
            load_dino(name, None, random, 224)
    with pytest.raises(UserError, match="--dino-image-size is 30, must be a multiple of 14"):
        load_dino(VIT, None, True, 30)
    with pytest.raises(UserError, match="exclude each other"):
        load_dino(VIT, Path("weights.pth"), True, 28)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"timm/vit_small_patch14_dinov2.lvd142m.*--dino-checkpoint FILE"):
        load_dino(f"{VIT}.lvd142m", None, False, 28)


# --- which slot tells most about the action, and which has the agent


def test_probing_finds_the_slot_that_knows_the_action(tmp_path: Path) -> None:
    """Scores against scikit-learn by hand; whole episodes are held out."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LinearRegression

    data = Dataset(planted.write(tmp_path, train=7, length=30), "cheetah-run", "train")
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
    by_hand = np.concatenate(errors).mean() / actions.var(0).mean()
    assert len(np.unique(episode)) == 5 and scores[1]["nmse"] == pytest.approx(by_hand, rel=1e-4)
    each = scores[1]["nmse_per_fold"]
    assert len(each) == 5 and np.mean(each) == pytest.approx(by_hand, rel=1e-3)
    wide = torch.from_numpy(rng.standard_normal((150, 2, 128)))  # where a fast PCA would use random numbers
    assert slots.probe_slots(wide, data, labelled, 5, 5) == slots.probe_slots(wide, data, labelled, 5, 5)
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


def test_the_picture_is_black_where_a_slot_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(slots.pictures, "rows", lambda path, rows, masks, title: drawn.update(rows))
    attention = torch.tensor([[[1.0, 0, 0, 0], [0, 1.0, 1.0, 1.0]]])
    slots.draw_slots(tmp_path / "slots.png", torch.full((1, 3, 8, 8), 0.25), torch.zeros(1, 1, 8, 8), attention, 2, "")
    assert list(drawn) == ["o(t)", "slot 1", "slot 2*"]
    corners = drawn["slot 1"][0, 0, [0, 7], [0, 7]], drawn["slot 2*"][0, 0, [0, 7], [0, 7]]
    assert torch.equal(torch.stack(corners), torch.tensor([[0.25, -0.5], [-0.5, 0.25]]))


# --- training


class Clips:
    """A sampler of the clips of one tensor, in random order."""

    def __init__(self, features: Tensor, batch_size: int) -> None:
        self.features, self.batch_size, self.batches_per_epoch = features, batch_size, len(features) // batch_size
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def next(self) -> SimpleNamespace:
        rows = np.random.default_rng(self.position).integers(0, len(self.features), self.batch_size)
        self.position += 1
        return SimpleNamespace(extra=self.features[torch.from_numpy(rows)])


def golden_slots(runs_dir: Path) -> list[float]:
    """Losses of ten updates of stage 1 from a fixed seed, on seeded random features.

    In float64, since float32 rounds differently from one processor to the next.
    """
    torch.set_default_dtype(torch.float64)
    try:
        args, model = video_saur(log_every=1, runs_dir=runs_dir, slot_warmup=2)
        run = runs.Run(args, "lapo_slots", "test", {})
        clips = Clips(torch.randn(16, 4, 9, 20, generator=torch.Generator().manual_seed(0)), 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            lapo_slots.train(run, args, "slots", model, lapo_slots.slot_loss, clips, 10, 1e-2, 0.05)
    finally:
        torch.set_default_dtype(torch.float32)
    losses = [line["slots/loss"] for line in run.read_metrics()]
    run.close()
    return losses


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
    sets = [Dataset(data, "cheetah-run", split) for split in ("train", "test")]
    for split in sets:
        attach_planted_slots(split, args)

    def nmse() -> float:
        def pairs(dataset: Dataset):
            with torch.inference_mode():
                for batch in sequential(dataset, 256, max_offset=1, device=CPU):
                    yield module.encode(model, batch, args), batch.action

        return evaluation.nmse(pairs(sets[0]), pairs(sets[1]), sets[0].action_variance)["nmse"]

    untrained = nmse()
    lam_training(module, args, model, data, 600)
    trained = nmse()
    print(f"NMSE {trained:.3f}, untrained {untrained:.3f}")
    assert trained < 0.6 * untrained


if __name__ == "__main__":  # writes the golden losses of stage 1 anew
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        losses = json.loads(GOLDEN.read_text()) | {"lapo_slots, slots": golden_slots(Path(folder))}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
