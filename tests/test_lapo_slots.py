"""LAPO-Slots: VideoSAUR, features of DINOv2, slots of whole episodes, probing, the agent's slot, latent actions."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import torch
from methods import CPU, attach_planted_slots, build, lam_sampler, lam_training
from torch import Tensor

import lapo_slots
from common import dino, runs, slots
from common.cache import cached_parts
from common.dataset import Dataset, sequential
from common.dino import Features, load_dino, weights_hash
from common.errors import UserError
from common.shards import SidecarWriter, read_sidecar, sidecar_hash, sidecar_path, verify_sidecar

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
    count = sum(p.numel() for p in model.parameters())
    assert count == 4 * d + project + attention + block + mixer
    lam = lapo_slots.LatentActionModel(args)

    def mlp(inputs: int, outputs: int) -> int:
        return linear(inputs, 1024) + 3 * (2 * 1024 + 2 * linear(1024, 1024)) + linear(1024, outputs)

    assert sum(p.numel() for p in lam.idm.parameters()) == mlp(2 * d, 128)
    assert sum(p.numel() for p in lam.fdm.parameters()) == mlp(d + 128, d)
    prediction, z = lam(torch.zeros(3, 2, d))
    assert prediction.shape == (3, d) and z.shape == (3, 128)
    decoded, logits = video_saur()[1](torch.randn(2, 4, 9, 10))
    assert decoded.shape == (2, 4, 9, 10) and logits.shape == (2, 4, 9, 9)


def test_defaults_follow_the_papers_table() -> None:
    dcs, dmw = lapo_slots.defaults(["--env", "walker-run"]), lapo_slots.defaults(["--env=reach"])
    for args, batch, epochs, rate, count in ((dcs, 256, 1, 3e-4, 4), (dmw, 128, 4, 1.5e-4, 3)):
        assert (args.batch_size, args.lam_epochs, args.policy_epochs, args.num_slots) == (batch, epochs, epochs, count)
        assert (args.lam_lr, args.policy_lr, args.decoder_lr, args.slot_lr) == (rate, rate, 1e-3, 3e-4)
        assert (args.slot_updates, args.slot_warmup, args.slot_clip, args.slot_iterations) == (25_000, 1250, 0.05, 3)
        assert (args.lam_clip, args.policy_clip, args.decoder_clip, args.decoder_updates) == (1.0, 1.0, None, 25_000)
        assert (args.slot_dim, args.similarity_weight, args.similarity_temperature) == (128, 0.1, 0.075)
        assert (args.pca_components, args.probe_folds, args.offset, args.num_labels) == (32, 5, 10, 128_000)
        assert (args.lam_dim, args.lam_blocks, args.latent_dim, args.decoder_dim) == (1024, 3, 128, 256)
        assert (args.policy_scale, args.dino_model, args.dino_weights) == (
            4,
            "vit_base_patch14_dinov2.lvd142m",
            "pretrained",
        )


def test_schedule() -> None:
    """Linear warm-up, then exponential decay to a half; constant in the other stages."""
    args = lapo_slots.Args()
    rates = [lapo_slots.schedule(args, "slots", step, 25_000, 100) for step in (0, 625, 1250, 13_125, 25_000)]
    assert rates == pytest.approx([0, 0.5, 1, math.sqrt(0.5), 0.5])
    assert {lapo_slots.schedule(args, stage, 7, 10, 5) for stage in ("lam", "bc", "decoder")} == {1.0}
    assert lapo_slots.schedule(args, "slots", 5, 10, 5) == 1.0  # a short run warms up for half of it


def test_permuting_the_initial_slots_permutes_the_outputs() -> None:
    _, model = video_saur()
    features, order = torch.randn(3, 4, 9, 10), torch.tensor([2, 0, 3, 1])
    found, attention, state = model.follow(features)
    decoded, logits = model(features)
    model.initial.data = model.initial.data[order]
    other, other_attention, other_state = model.follow(features)
    torch.testing.assert_close(other, found[:, :, order])
    torch.testing.assert_close(other_attention, attention[:, :, order])
    torch.testing.assert_close(other_state, state[:, order])
    for a, b in zip(model(features), (decoded, logits)):
        torch.testing.assert_close(a, b)
    assert (found - other).abs().max() > 0.01
    torch.testing.assert_close(attention.sum(2), torch.ones(3, 4, 9))  # the slots share each patch


def test_following_goes_on_from_the_state() -> None:
    """A clip in two pieces gives the slots of the whole one; without the state it does not."""
    _, model = video_saur()
    features = torch.randn(2, 6, 9, 10)
    whole, attention, state = model.follow(features)
    first, first_attention, between = model.follow(features[:, :2])
    second, second_attention, last = model.follow(features[:, 2:], between)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(torch.cat([first_attention, second_attention], 1), attention)
    torch.testing.assert_close(last, state)
    assert (model.follow(features[:, 2:])[0] - whole[:, 2:]).abs().max() > 1e-3


# --- losses


def naive_similarity(keys: np.ndarray, temperature: float) -> np.ndarray:
    """VideoSAUR's target, one pair of patches at a time."""
    clips, frames, patches, _ = keys.shape
    target = np.zeros((clips, frames - 1, patches, patches))
    for b in range(clips):
        for t in range(frames - 1):
            for i in range(patches):
                row = []
                for j in range(patches):
                    a, c = keys[b, t, i], keys[b, t + 1, j]
                    cosine = float(a @ c) / math.sqrt(float(a @ a) * float(c @ c))
                    row.append(math.exp(cosine / temperature) if cosine >= 0 else 0.0)
                target[b, t, i] = np.array(row) / sum(row) if sum(row) else 1 / patches
    return target


def test_temporal_similarity_against_a_naive_loop() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, 4, 5, 3))
    keys[1, 1, 2] = [9, 0, 0]  # a patch that is unlike every patch of the next frame
    keys[1, 2, :, 0] = -np.abs(keys[1, 2, :, 0])
    target = lapo_slots.temporal_similarity(torch.from_numpy(keys), 0.075).numpy()
    np.testing.assert_allclose(target, naive_similarity(keys, 0.075), rtol=1e-6, atol=1e-12)
    assert np.allclose(target[1, 1, 2], 0.2) and (target == 0).any()


def test_slot_loss_against_a_naive_loop() -> None:
    args, model = video_saur()
    batch = SimpleNamespace(extra=torch.randn(2, 4, 9, 20).half())
    loss, z, logs = lapo_slots.slot_loss(model, batch, args)
    features, keys = batch.extra.double().numpy()[..., :10], batch.extra.double().numpy()[..., 10:]
    with torch.no_grad():
        decoded, logits = (part.double().numpy() for part in model(batch.extra[..., :10].float()))
    target, entropy = naive_similarity(keys, 0.075), []
    for index in np.ndindex(2, 3, 9):
        row = logits[index]
        entropy.append(sum(-p * (x - math.log(sum(np.exp(row)))) for p, x in zip(target[index], row)))
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
    received = {}
    model.idm.register_forward_pre_hook(lambda _, inputs: received.update(idm=inputs[0]))
    model.fdm.register_forward_pre_hook(lambda _, inputs: received.update(fdm=inputs[0]))
    model.fdm.register_forward_hook(lambda _, inputs, output: received.update(out=output))
    loss, z, _ = module.lam_loss(model, batch, args)
    now, later = batch.extra.float().unbind(1)
    assert torch.equal(received["idm"], torch.cat([now, later], 1))
    assert torch.equal(received["fdm"], torch.cat([now, z], 1))
    assert loss.item() == pytest.approx(((received["out"] - later) ** 2).mean().item())
    assert batch.frames is None and torch.equal(module.encode(model, batch, args), z)


# --- what batches carry


def test_rows_around_t_stay_in_the_episode(tmp_path: Path) -> None:
    """Clips and pairs against a naive loop, at both ends of episodes and across shards."""
    data = Dataset(planted.write(tmp_path, train=5, lengths=(3, 14, 6), shards=2), "cheetah-run", "train")
    rows = np.arange(data.num_frames * 4, dtype=np.float16).reshape(-1, 4)
    cuts = np.cumsum([shard.frames for shard in data.shards])[:-1]
    data.attach("clip", np.split(rows, cuts), "", offsets=dino.CLIP)
    attach_planted_slots(data, lapo_slots.Args(slot_dim=4, num_slots=2))
    for name, offsets in (("clip", (-2, -1, 0, 1)), ("slots", (0, 10))):
        table = data.extra(name, np.arange(data.num_frames))
        seen = 0
        options = {"max_offset": 1, "device": CPU, "extra": None if name == "slots" else name}  # slots are carried
        for batch in sequential(data, 7, **options):
            for t, found in zip(batch.index.tolist(), batch.extra.numpy()):
                episode = data.episode_of_frame[t]
                first, last = data.episode_start[episode], data.episode_start[episode + 1] - 1
                expected = [table[min(max(t + offset, first), last)] for offset in offsets]
                assert np.array_equal(found, np.stack(expected))
                seen += 1
        assert seen == data.num_transitions
    assert next(sequential(data, 4, max_offset=1, device=CPU)).frames is None  # carried instead of frames
    stack = next(sequential(data, 4, max_offset=0, device=CPU))
    assert stack.extra is None and stack.frames.shape[:2] == (4, 3)  # what a policy sees
    clip = sequential(data, 64, max_offset=1, device=CPU, extra="clip")
    table = {tuple(row.tolist()): i for i, row in enumerate(rows)}
    for batch in clip:  # the clip's rows belong to the window's frames
        index = np.array([[table[tuple(row.tolist())] for row in clip] for clip in batch.extra.numpy()])
        assert np.array_equal(data.frames(index), batch.frames.numpy())


# --- features


@pytest.fixture(scope="module")
def planted_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards per split of frames of 32 x 32."""
    return planted.write(tmp_path_factory.mktemp("shards"), train=2, test=2, length=5, shards=2)


def features_of(cache: bool = True, **changes) -> Features:
    options = {"name": VIT, "checkpoint": None, "random": True, "image_size": 28, "cache": cache, "device": CPU}
    return Features(**(options | changes))


def test_dino_gives_the_last_blocks_output_and_keys() -> None:
    """Against a pass through timm's network by hand."""
    network = load_dino(VIT, None, True, 28, CPU)
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16, 3), np.uint8))
    found = network(frames)
    assert found.shape == (2, 3, 4, 768) and found.dtype == torch.float16 and not found.requires_grad
    vit = network.vit
    image = torch.nn.functional.interpolate(frames[0].movedim(-1, 1) / 255, size=(28, 28), mode="bilinear")
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed((image - mean) / std))))
    for block in vit.blocks[:-1]:
        x = block(x)
    last = vit.blocks[-1]
    keys = last.attn.qkv(last.norm1(x)).unflatten(2, (3, 384))[:, 1:, 1]
    torch.testing.assert_close(found[0, :, :, :384].float(), last(x)[:, 1:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[0, :, :, 384:].float(), keys, rtol=1e-3, atol=1e-3)


def test_random_weights_are_always_the_same_and_leave_the_runs_random_numbers(capsys) -> None:
    torch.manual_seed(5)
    hashes = [weights_hash(features_of().dino.vit) for _ in range(2)]
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert hashes[0] == hashes[1] and torch.equal(drawn, torch.rand(3))
    assert "random weights" in capsys.readouterr().out


def test_files_in_pieces_are_whole_or_refused(planted_dir: Path) -> None:
    """Pieces give the file, and the hashes, of arrays written at once; rows that are missing or in disorder do not."""
    path, rng = planted_dir / "cheetah-run/train/00000.h5", np.random.default_rng(0)
    arrays = {"b": rng.random((84, 3)), "a": rng.random((84, 2, 2)).astype(np.float16)}
    schema = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    pieces = [(name, first, arrays[name][first : first + 30]) for name in ("a", "b") for first in (0, 30, 60)]
    written = []
    for number in range(2):
        with SidecarWriter(path, "pieces") as writer:
            made = writer.write(arrays) if number else writer.stream(schema, pieces)
        file = read_sidecar(made, writer.shard)
        assert all(np.array_equal(file.array(name), array) for name, array in arrays.items())
        assert file.attributes["content_hash"] == sidecar_hash(arrays)
        assert all(file.attributes[f"{name}_hash"] == sidecar_hash({name: array}) for name, array in arrays.items())
        verify_sidecar(made, writer.shard)
        written.append(made.read_bytes())
        made.unlink()
    assert written[0] == written[1]
    for wrong in (pieces[1:], pieces[:-1], [*pieces[3:], *pieces[:3]], [*pieces, pieces[-1]]):
        with SidecarWriter(path, "pieces") as writer, pytest.raises(ValueError, match="rows"):
            writer.stream(schema, wrong)
        assert not list(path.parent.glob("*pieces*"))


def test_checkpoints(tmp_path: Path) -> None:
    """Files of timm and of DINOv2's authors, whose positions are for 518 pixels; errors name the file."""
    import safetensors.torch
    import timm

    original = timm.create_model(VIT, pretrained=False, num_classes=0).state_dict()
    safetensors.torch.save_file(original, tmp_path / "timm.safetensors")
    torch.save(original | {"mask_token": torch.zeros(1, 384)}, tmp_path / "authors.pth")
    loaded = [load_dino(VIT, tmp_path / name, False, 28, CPU).vit for name in ("timm.safetensors", "authors.pth")]
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
            load_dino(VIT, tmp_path / name, False, 28, CPU)
    with pytest.raises(UserError, match="not the weights of vit_small_patch14_reg4_dinov2"):
        load_dino("vit_small_patch14_reg4_dinov2", tmp_path / "authors.pth", False, 28, CPU)


def test_names_and_sizes_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vit_nothing", "resnet18", "beit_base_patch16_224"):
        with pytest.raises(UserError, match=f"--dino-model {name}"):
            assert features_of(name=name, image_size=224).dino
    with pytest.raises(UserError, match="--dino-image-size is 30, must be a multiple of 14"):
        features_of(image_size=30)
    with pytest.raises(UserError, match="exclude each other"):
        features_of(checkpoint=Path("weights.pth"))


def test_without_a_network_the_file_to_get_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"timm/vit_small_patch14_dinov2.lvd142m.*--dino-checkpoint FILE"):
        load_dino(f"{VIT}.lvd142m", None, False, 28, CPU)


def test_files_hold_what_is_computed_on_the_fly(
    planted_shards: Path, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For every frame, the last of an episode too; made once, for both renders, and refused with other settings."""
    sets = [Dataset(planted_shards, "cheetah-run", split) for split in ("train", "test")]
    features, computed = features_of(), features_of(cache=False)
    features.attach(*sets)
    said = capsys.readouterr().out
    assert "DINOv2 features of 24 frames: 0.0 GB beside the shards" in said and "hours at" in said
    index = np.arange(sets[0].num_frames).reshape(2, -1)
    expected = computed.of(sets[0], index)
    torch.testing.assert_close(features.of(sets[0], index), expected, rtol=2e-3, atol=2e-3)
    assert features.of(sets[0], index).shape == (2, 6, 4, 768) and features.frame_bytes == 4 * 768 * 2
    samplers = [part.sampler(sets[0], 4, seed=3) for part in (features, computed)]
    for _ in range(3):
        batches = [sampler.next() for sampler in samplers]
        assert batches[0].extra.shape == (4, 4, 4, 768) and batches[0].frames is None
        torch.testing.assert_close(batches[0].extra, batches[1].extra, rtol=2e-3, atol=2e-3)
        assert torch.equal(batches[0].index, batches[1].index) and torch.equal(batches[0].action, batches[1].action)
    for sampler in samplers:
        assert sampler.episodes(0) and sampler.batches_per_epoch == 2
        sampler.close()

    def forbidden(*_: object) -> None:
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr(dino, "load_dino", forbidden)  # not even the weights are needed any more
        again = features_of()
        again.attach(*sets)
        assert again.settings == features.settings and len(again.settings["weights"]) == 64
        with pytest.raises(UserError, match=r"image_size: 28 -> 42.*rm .*dino\.h5"):
            features_of(image_size=42).attach(*sets)
    before = {shard.path: read_sidecar(sidecar_path(shard.path, "dino"), shard) for shard in sets[0].shards}
    kept = {path: np.array(file.array("distractor/features")) for path, file in before.items()}
    clean = Dataset(planted_shards, "cheetah-run", "train", "clean")
    features_of().attach(clean)
    for shard in clean.shards:
        file = read_sidecar(sidecar_path(shard.path, "dino"), shard)
        assert set(file.datasets) == {"clean/features", "distractor/features"}
        assert np.array_equal(file.array("distractor/features"), kept[shard.path])
        assert file.attributes["distractor/features_hash"] == before[shard.path].attributes["distractor/features_hash"]
    clean.verify()
    path = sidecar_path(clean.shards[0].path, "dino")
    content = bytearray(path.read_bytes())
    content[read_sidecar(path, clean.shards[0]).datasets["clean/features"][2] + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"00000\.dino\.h5: does not match its hash; repair with: rm"):
        clean.verify()
    path.unlink()


def test_the_disk_decides(planted_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Without room for all features none is written, and what a killed run left is removed."""
    dataset = Dataset(planted_dir, "cheetah-run", "train")
    left = dataset.folder / "00000.dino.h5.part"
    left.write_bytes(b"half a file")
    monkeypatch.setattr(dino.shutil, "disk_usage", lambda path: SimpleNamespace(free=84 * 4 * 768 * 2))
    features = features_of()
    features.attach(dataset)
    assert "that does not fit" in capsys.readouterr().out and not features.cache
    assert not list(dataset.folder.glob("*.dino.h5*")) and len(features.settings["weights"]) == 64
    assert features.of(dataset, np.array([3])).shape == (1, 4, 768)


# --- slots of whole episodes


@pytest.fixture
def uneven(tmp_path: Path) -> Dataset:
    """Seven episodes of different lengths with features of their own."""
    data = Dataset(planted.write(tmp_path, train=7, lengths=(3, 20, 37), shards=2), "cheetah-run", "train")
    rows = np.random.default_rng(0).standard_normal((data.num_frames, 9, 20)).astype(np.float16)
    data.attach("dino", np.split(rows, np.cumsum([shard.frames for shard in data.shards])[:-1]), "")
    return data


def planted_features() -> Features:
    features = features_of()
    features.dim, features.patches = 10, 9
    return features


def make_run(folder: Path) -> runs.Run:
    return runs.Run(lapo_slots.Args(runs_dir=folder), "lapo_slots", "test", {})


def test_slots_of_episodes_side_by_side_are_those_of_each_alone(uneven: Dataset, tmp_path: Path) -> None:
    _, model = video_saur()
    run = make_run(tmp_path)
    found, seconds = slots.follow_split(run, "slots_train", model.follow, planted_features(), uneven)
    index, attention = slots.watch(model.follow, planted_features(), uneven, 3)
    assert seconds > 0 and found.dtype == torch.float16 and found.shape == (uneven.num_frames, 4, 8)
    for episode, (start, stop) in enumerate(zip(uneven.episode_start[:-1], uneven.episode_start[1:])):
        alone = uneven.extra("dino", np.arange(start, stop))[None, ..., :10]
        with torch.no_grad():
            expected, looked, _ = model.follow(torch.from_numpy(alone).float())
        torch.testing.assert_close(found[start:stop].float(), expected[0], rtol=2e-3, atol=2e-3)
        if episode < 3:
            torch.testing.assert_close(attention[start:stop], looked[0], rtol=2e-3, atol=2e-3)
    assert np.array_equal(index, np.arange(uneven.episode_start[3])) and len(attention) == len(index)
    run.close()


def test_a_stop_while_slots_are_computed_loses_no_finished_episodes(
    uneven: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = video_saur()
    whole = make_run(tmp_path / "whole")
    expected, _ = slots.follow_split(whole, "slots_train", model.follow, planted_features(), uneven)
    run, calls = make_run(tmp_path / "stopped"), []

    def counted(*inputs):
        calls.append(inputs)
        return model.follow(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "stop_requested", lambda: len(calls) == 4)  # in the second part: 4 episodes and 3 of 37
        with pytest.raises(runs.Stopped, match="same command"):
            slots.follow_split(run, "slots_train", counted, planted_features(), uneven)
    saved = json.loads((run.dir / "slots_train.progress.json").read_text())
    assert saved["parts"] == 1 and saved["rows"] == uneven.episode_start[4] and not list(run.dir.glob("*.npy"))
    calls.clear()
    found, _ = slots.follow_split(run, "slots_train", counted, planted_features(), uneven)
    assert torch.equal(found, expected) and len(calls) < 6
    calls.clear()
    slots.follow_split(run, "slots_train", counted, planted_features(), uneven)
    assert not calls  # mapped from the file
    for one in (whole, run):
        one.close()


def test_parts_of_any_shape_and_kind_are_cached(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    values = torch.arange(24).view(6, 2, 2)
    found, _ = cached_parts(run, "x", 6, 2, lambda start: iter(values.split(3)[start:]), dtype=np.float16)
    assert found.dtype == torch.float16 and torch.equal(found, values.half())
    run.close()


# --- probing


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
    for held in np.unique(episode):  # five labelled episodes, so one is a fold
        test = episode == held
        pca = PCA(5).fit(values[~test, 1])
        probe = LinearRegression().fit(pca.transform(values[~test, 1]), actions[~test])
        errors.append((probe.predict(pca.transform(values[test, 1])) - actions[test]) ** 2)
    by_hand = np.concatenate(errors).mean() / actions.var(0).mean()
    assert len(np.unique(episode)) == 5 and scores[1]["nmse"] == pytest.approx(by_hand, rel=1e-4)
    assert len(scores[1]["nmse_per_fold"]) == 5 and np.mean(scores[1]["nmse_per_fold"]) == pytest.approx(
        by_hand, rel=1e-3
    )
    wide = torch.from_numpy(
        rng.standard_normal((150, 2, 128)).astype(np.float32)
    )  # where a fast PCA would draw numbers
    assert slots.probe_slots(wide, data, labelled, 5, 5) == slots.probe_slots(wide, data, labelled, 5, 5)
    few = slots.probe_slots(torch.from_numpy(values[:40]), data, data.labelled(40, seed=2), components=32, folds=5)
    assert len(few[0]["nmse_per_fold"]) == 2  # two episodes
    with pytest.raises(UserError, match=r"one episode.*--num-labels"):
        slots.probe_slots(torch.from_numpy(values[:20]), data, data.labelled(20, seed=2), components=32, folds=5)


# --- which slot has the agent


def test_agent_report_by_hand(train_set: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots on a grid of 2 x 2 patches, 32 x 32 pixels; enlarged without blending so that areas are exact."""

    def blocks(attention: Tensor, size: int) -> Tensor:
        return attention.unflatten(-1, (2, 2)).repeat_interleave(16, -1).repeat_interleave(16, -2)

    monkeypatch.setattr(slots, "enlarge", blocks)
    left = np.zeros((32, 32), bool)
    left[:, :16] = True
    quarter = np.zeros((32, 32), bool)
    quarter[:16, :16] = True
    masks = {0: left, 1: quarter, 2: np.zeros((32, 32), bool), 3: ~left}
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


def test_attention_is_enlarged_over_the_frame() -> None:
    attention = torch.tensor([[[1.0, 0, 0, 0]]])
    large = slots.enlarge(attention, 8)
    assert large.shape == (1, 1, 8, 8) and large[0, 0, 0, 0] == 1 and large[0, 0, 7, 7] == 0
    frame = torch.full((1, 3, 8, 8), 0.25)
    shown = slots.masked(frame, attention[:, 0])
    assert shown[0, 0, 0, 0] == 0.25 and shown[0, 0, 7, 7] == -0.5  # black where it does not look


# --- training


def shapes(rng: np.random.Generator, clips: int, frames: int, side: int = 10) -> tuple[Tensor, Tensor]:
    """Clips of coloured squares that move and bounce, as their patches' colours and positions (clips, frames, N, 9).

    Also the mask of the agent, the red one: bool (clips, frames, N).
    """
    colours = np.array([[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], np.float32)
    pictures = np.zeros((clips, frames, side, side, 3), np.float32)
    mask = np.zeros((clips, frames, side, side), bool)
    for clip in range(clips):
        objects = [(colour, size, rng.uniform(0, side - size, 2), rng.uniform(-1, 1, 2)) for colour, size in SHAPES]
        for frame in range(frames):
            picture = np.broadcast_to(colours[0], (side, side, 3)).copy()
            for number, (colour, size, place, speed) in enumerate(objects):
                y, x = np.round(place).astype(int)
                picture[y : y + size, x : x + size] = colours[colour]
                mask[clip, frame, y : y + size, x : x + size] = colour == 1  # the last square is in front
                speed = np.where((place + speed < 0) | (place + speed > side - size), -speed, speed)
                objects[number] = colour, size, np.clip(place + speed, 0, side - size), speed
            pictures[clip, frame] = picture + 0.05 * rng.standard_normal(picture.shape)
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-1, 1, side)], indexing="ij"), -1).astype(np.float32)
    position = np.concatenate([grid, np.sin(3 * grid), np.cos(3 * grid)], -1)
    position = np.broadcast_to(position, (clips, frames, *position.shape))
    features = np.concatenate([2 * pictures, 0.5 * position], -1)
    return torch.from_numpy(features).flatten(2, 3), torch.from_numpy(mask).flatten(2)


SHAPES = ((2, 2), (3, 2), (1, 3))  # colour and side


def overlap(model: lapo_slots.VideoSaur, features: Tensor, mask: Tensor) -> Tensor:
    """IoU of each slot's patches with the agent's: (clips, frames, K)."""
    with torch.no_grad():
        owner = model.follow(features)[1].argmax(2)
    belongs = owner[..., None] == torch.arange(len(model.initial))
    return (belongs & mask[..., None]).sum(2) / (belongs | mask[..., None]).sum(2)


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


def test_a_slot_learns_to_follow_the_agent(tmp_path: Path) -> None:
    """Moving coloured squares: one fixed slot has the agent in all clips, and keeps it over 20 frames."""
    rng = np.random.default_rng(1)
    features, _ = shapes(rng, 200, 4)
    held_out, mask = shapes(rng, 32, 20)
    args, model = video_saur(
        patches=100, dim=9, seed=1, slot_dim=32, renderer_dim=64, slot_warmup=50, log_every=50, runs_dir=tmp_path
    )
    untrained = overlap(model, held_out, mask).mean((0, 1)).max()
    run = make_run(tmp_path)
    stage = "slots", model, lapo_slots.slot_loss, Clips(features.repeat(1, 1, 1, 2), 16), LEARNING_UPDATES, 2e-3, 0.05
    lapo_slots.train(run, args, *stage)
    run.close()
    iou = overlap(model.eval(), held_out, mask)
    each = iou.mean((0, 1))
    print(f"IoU of each slot {each.tolist()}, untrained at best {untrained:.3f}")
    assert each.max() > 0.7 > 2 * untrained
    assert iou[:, :, each.argmax()].mean(1).min() > 0.5  # in every clip
    best = iou.argmax(2)
    changes = (best[:, 1:] != best[:, :-1]).float().mean()
    print(f"the agent's slot changes between {changes:.3f} of the frames")
    assert changes < 0.02 and (best == each.argmax()).float().mean() > 0.95


LEARNING_UPDATES = 400


def golden_slots(runs_dir: Path) -> list[float]:
    """Losses of ten updates of stage 1 from a fixed seed, on seeded random features."""
    args, model = video_saur(log_every=1, runs_dir=runs_dir, slot_warmup=2)
    run = make_run(runs_dir)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 4, 9, 20, generator=generator).half()
    lapo_slots.train(run, args, "slots", model, lapo_slots.slot_loss, Clips(features, 4), 10, 1e-2, 0.05)
    found = [line["slots/loss"] for line in run.read_metrics()]
    run.close()
    return found


def test_golden_losses_of_the_slots(tmp_path: Path) -> None:
    """A pure refactoring must reproduce them. Remake: python tests/test_lapo_slots.py."""
    torch.testing.assert_close(
        golden_slots(tmp_path), json.loads(GOLDEN.read_text())["lapo_slots, slots"], rtol=1e-4, atol=0
    )


def test_latent_actions_of_a_slot_that_follows_the_agent(tmp_path: Path) -> None:
    """Stage 3 on a slot that knows where the planted square is: z tells the action well, better than untrained."""
    data = planted.write(tmp_path / "data", train=40, test=8, length=50, size=16, action_dim=2)
    module, args, model = build(
        "lapo_slots", size=16, batch_size=32, lam_lr=1e-3, offset=1, runs_dir=tmp_path, num_slots=2
    )
    found = []
    for updates in (0, 600):
        if updates:
            lam_training(module, args, model, data, updates)
        sets = [Dataset(data, "cheetah-run", split) for split in ("train", "test")]
        for split in sets:
            attach_planted_slots(split, args)
        found.append(nmse(module, args, model.eval(), sets))
    print(f"NMSE {found[1]:.3f}, untrained {found[0]:.3f}")
    assert found[1] < 0.6 * found[0]


def nmse(module, args, model, sets: list[Dataset]) -> float:
    from common import evaluation

    def pairs(dataset: Dataset):
        with torch.inference_mode():
            for batch in sequential(dataset, 256, max_offset=1, device=CPU):
                yield module.encode(model, batch, args), batch.action

    return evaluation.nmse(pairs(sets[0]), pairs(sets[1]), sets[0].action_variance)["nmse"]


def test_bad_values_are_refused() -> None:
    for changes, message in (
        ({"slot_dim": 6}, "multiple of 4"),
        ({"similarity_temperature": 0.0}, "above 0"),
        ({"slot_clip": 0.0}, "above 0"),
        ({"num_slots": 1}, "--num-slots is 1, must be at least 2"),
        ({"probe_folds": 1}, "--probe-folds is 1"),
        ({"offset": 0}, "--offset is 0"),
    ):
        with pytest.raises(UserError, match=message):
            lapo_slots.Args(**changes)


if __name__ == "__main__":  # writes the golden losses of stage 1 anew
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        losses = json.loads(GOLDEN.read_text()) | {"lapo_slots, slots": golden_slots(Path(folder))}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
