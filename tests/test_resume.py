"""Runs that are stopped, killed or damaged and then rerun: exact results, clear errors, nothing lost."""

import functools
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods
import numpy as np
import planted
import pytest
import torch
from methods import CPU, SCRIPTS, ScriptProcess, build, lam_training, metrics, open_run

import lapo
from common import evaluation, runs, store
from common.cli import Stopped, UserError
from common.dataset import Batch, Dataset

UPDATES = {"lam": 8, "policy": 8, "decoder": 24}
TINY = methods.TINY | {"batch_size": 8, "log_every": 1, "checkpoint_every": 3, "device": "cpu", "variant": "test"}
TINY |= {f"{stage}_updates": updates for stage, updates in UPDATES.items()}
TINY |= {"eval_episodes": 2, "eval_envs": 1, "eval_steps": 8}
BUDGETS = {"masklam": (8, 20)}  # of labels; (20,) for the others

Whole = Callable[[str], Path]  # a script to the directory of a whole, undisturbed run of it


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write(tmp_path_factory.mktemp("planted"), train=3, test=2, length=12)


def start(script: str, data: Path, runs_dir: Path, file_limit: int | None = None, **changes: Any) -> ScriptProcess:
    """Starts a tiny run."""
    values = TINY | {"data_dir": data, "runs_dir": runs_dir, "num_labels": BUDGETS.get(script, (20,))} | changes
    words = [*methods.words(values), *methods.flags(script, data)]
    return ScriptProcess(script, words, runs_dir / "output", file_limit)


def finish(*arguments: Any, **changes: Any) -> subprocess.CompletedProcess:
    return start(*arguments, **changes).wait()


def run_dir(script: str, runs_dir: Path) -> Path:
    return runs_dir / script / "cheetah-run/test/seed1"


def result_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def copy_run(directory: Path, runs_dir: Path, without: tuple[str, ...], **arguments: Any) -> Path:
    """A copy of a run in another folder of runs, without some of its files and with other arguments."""
    copied = runs_dir / directory.relative_to(directory.parents[3])
    shutil.copytree(directory, copied)
    for name in without:
        (copied / name).unlink()
    there = json.loads((copied / "args.json").read_text())
    (copied / "args.json").write_text(json.dumps(there | arguments))
    return copied


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of the finished stages, by stage, part and name."""
    named = {}
    for path in directory.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        for part in ("model", "probe"):
            named |= {f"{path.stem}.{part}.{name}": value for name, value in (state[part] or {}).items()}
    return named


def losses(directory: Path) -> list[tuple[str, int, float]]:
    lines = [line for line in metrics(directory) if "lam/nmse" not in line]
    return [(line["stage"], line["step"], line.get(f"{line['stage']}/loss")) for line in lines]


def check_same(directory: Path, reference: Path) -> None:
    """Weights, losses, latent actions and results of two runs are the same, bit for bit."""
    there, here = weights(reference), weights(directory)
    assert there.keys() == here.keys()
    assert [name for name in there if not torch.equal(there[name], here[name])] == []
    assert losses(directory) == losses(reference)
    results = [result_of(path) for path in (reference, directory)]
    for name in ("metrics", "decoders", "labelled_episodes", "nmse_per_dimension", "slots"):
        assert results[0].get(name) == results[1].get(name), name
    with np.load(reference / "latents.npz") as file, np.load(directory / "latents.npz") as other:
        assert all(np.array_equal(file[name], other[name]) for name in ("z", "action", "step"))
    assert not list((directory / "checkpoints").iterdir()) and not list(directory.rglob("*.part*"))


@pytest.fixture(scope="module")
def whole_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    @functools.cache
    def whole(script: str) -> Path:
        runs_dir = tmp_path_factory.mktemp(script)
        done = finish(script, data_dir, runs_dir)
        assert done.returncode == 0, done.stderr
        return run_dir(script, runs_dir)

    return whole


# Files and stages that a method has beside those of all.
FILES = {"laom_labels": {"augmentations.png"}, "laof": {"flow.png"}, "lapo_slots": {"slots.png", "slots.pt"}}
STAGES = {"laof": {"flow"}, "masklam": {"decoder-8", "rollout-8"}}
STAGES["lapo_slots"] = {"slots", "slots_labelled", "slots_attention", "slots_train", "slots_test"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_end_to_end(script: str, whole_run: Whole, data_dir: Path) -> None:
    directory = whole_run(script)
    files = {path.name for path in directory.iterdir()}
    assert files >= {"metrics.jsonl", "latents.npz", "curves.png", "lam.pt", "policy.pt", "decoder.pt"}
    assert files >= FILES.get(script, {"world_model.png"}) and "tables" not in files
    result = result_of(directory)
    assert {Path(path).name for path in result["pictures"]} == {name for name in files if name.endswith(".png")}
    stages = {"lam", "latents", "probe", "policy", "features", "decoder", "rollout"}
    assert set(result["seconds"]) == stages | STAGES.get(script, set())
    assert result["script"] == script and result["peak_memory_gib"] > 0 and result["parameters"]["lam"] > 0
    assert torch.__version__.startswith(result["versions"]["torch"]) and result["machine"]["torch_threads"] == 1
    train_set, test_set = (Dataset(data_dir, "cheetah-run", split) for split in ("train", "test"))
    assert result["dataset"]["train"]["hash"] == train_set.hash and result["labelled_transitions"] == 20
    listed = [train_set.episode_start[int(e)] + np.arange(n) for e, n in result["labelled_episodes"].items()]
    assert np.array_equal(np.concatenate(listed), train_set.labelled(20, seed=1))
    with np.load(directory / "latents.npz") as file:
        assert file["z"].shape == (test_set.num_transitions, 16)
    assert [decoder["num_labels"] for decoder in result["decoders"]] == list(BUDGETS.get(script, (20,)))
    for decoder in result["decoders"]:
        assert decoder["lengths"] == [8, 8] and len(set(decoder["returns"])) == 2
        assert decoder["normalised_paper"] is decoder["normalised_dataset"] is None  # eight steps are no episode
    assert result["metrics"]["eval/return"] == result["decoders"][-1]["return_mean"]
    assert min(result["metrics"]["eval/nmse"], result["metrics"]["eval/nmse_untrained"]) > 0
    for stage, updates in UPDATES.items():
        of_stage = [(step, loss) for name, step, loss in losses(directory) if name == stage]
        assert [step for step, _ in of_stage] == list(range(1, updates + 1))
        assert sum(loss for _, loss in of_stage[-3:]) < sum(loss for _, loss in of_stage[:3]), stage


# What a run is killed after: an update of a stage, or a file of the run or of its data.
KILLS: dict[str, list[tuple[str, int] | str]] = {
    # before the first checkpoint, between two, across a stage's end, and in every later stage
    "masklam": [("lam", 2), ("lam", 5), ("lam", 8), ("policy", 4), ("decoder", 7), ("decoder-8", 5)],
    "laom_labels": [("lam", 4)],
    "laof": [".00000.raft.h5.claim", ("lam", 4)],
    "lapo_slots": [("slots", 4), "slots_train.pt"],
}


@pytest.mark.parametrize("script", KILLS)
def test_killed_and_rerun_is_bit_identical(script: str, whole_run: Whole, data_dir: Path, tmp_path: Path) -> None:
    reference, directory = whole_run(script), run_dir(script, tmp_path)
    data = shutil.copytree(data_dir, tmp_path / "data", ignore=shutil.ignore_patterns("*.raft.h5"))

    def happened(event: tuple[str, int] | str) -> bool:
        if isinstance(event, str):
            return any(tmp_path.rglob(event))
        return any(line["stage"] == event[0] and line["step"] >= event[1] for line in metrics(directory))

    for event in KILLS[script]:
        process = start(script, data, tmp_path)
        process.until(functools.partial(happened, event))
        process.signal(signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL and not (directory / "result.json").exists()
    done = finish(script, data, tmp_path)
    assert done.returncode == 0, done.stderr
    check_same(directory, reference)
    assert not list(data.rglob("*.claim"))


def test_full_disk(data_dir: Path, tmp_path: Path) -> None:
    """A limit of a file's size acts like one: one message, no half-written checkpoint, nothing in the way later."""
    done = finish("lapo", data_dir, tmp_path, file_limit=400_000)
    assert done.returncode == 1 and "make room and rerun the same command" in done.stderr
    directory = run_dir("lapo", tmp_path)
    assert "Traceback" not in done.stderr and not list(directory.rglob("*.pt*")) and metrics(directory)
    done = finish("lapo", data_dir, tmp_path, stages="lam")
    assert done.returncode == 0 and (directory / "lam.pt").exists()


def test_a_signal_saves_and_says_so(data_dir: Path, tmp_path: Path) -> None:
    directory = run_dir("lapo", tmp_path)
    process = start("lapo", data_dir, tmp_path, lam_updates=5000, checkpoint_every=1000)
    process.until(lambda: len(metrics(directory)) > 1)
    process.signal(signal.SIGUSR1)
    done = process.wait()
    assert done.returncode == 128 + signal.SIGUSR1 and "rerun the same command to resume" in done.stderr
    (path,) = (directory / "checkpoints").glob("lam-*.pt")
    saved = torch.load(path, weights_only=True)["step"]
    assert int(re.search(r"lam at update (\d+) of 5000", done.stderr)[1]) == saved == metrics(directory)[-1]["step"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_the_evaluation(
    number: int, whole_run: Whole, data_dir: Path, tmp_path: Path
) -> None:
    """As a terminal or a job scheduler sends it, while environments run in processes of their own."""
    directory = copy_run(whole_run("lapo"), tmp_path, without=("result.json",), eval_episodes=1000)
    process = start("lapo", data_dir, tmp_path, eval_episodes=1000, eval_envs=2)
    features = directory / "tables/features.pt"
    process.until(lambda: features.exists() and process.size() > 2)
    process.signal(number)
    done = process.wait()
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    assert "these episodes start over; rerun the same command to resume" in done.stderr
    assert not (directory / "result.json").exists() and (directory / "tables/probe.pt").exists()


@pytest.mark.usefixtures("signals")
def test_a_signal_ends_a_pass_over_the_data(train_set: Dataset, tmp_path: Path) -> None:
    """In its middle; nothing of it is kept."""
    run = open_run(tmp_path)
    batches = []

    def function(batch: Batch) -> torch.Tensor:
        batches.append(batch)
        if len(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
        return batch.index

    windows = {"batch_size": 16, "device": CPU, "max_offset": 1}
    with pytest.raises(Stopped, match="starts over"):
        evaluation.table(run, "latents", function, train_set, train_set.transitions, **windows)
    assert len(batches) == 2 and not list(run.dir.rglob("latents*"))
    run.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_newest_checkpoint(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It is reported and set aside; the one before is used, and the metrics go back to it."""
    run = open_run(tmp_path)
    for step in range(1, 10):
        run.log("lam", step, {"lam/loss": 1 / step})
        if step % 2 == 0:
            newest = run.save("lam", step, {"value": torch.full((1000,), float(step))})
    run.log("other", 1, {})
    run.close()
    with open(run.metrics_path, "a") as file:
        file.write('{"stage": "lam", "st')  # torn by the kill
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content if damage == "flipped" else content[:-100])
    assert len(list(newest.parent.iterdir())) == 2
    run = open_run(tmp_path)
    state = run.restore("lam")
    assert state["step"] == 6 and (state["value"] == 6).all()
    assert f"{newest} is damaged; using the checkpoint before it" in capsys.readouterr().err
    assert [line["step"] for line in runs.read_metrics(run.dir)] == [1, 2, 3, 4, 5, 6, 1]
    run.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": {"train_hash": "b"}}, r"(?s)\n  train_hash: a -> b\n.*--variant"),
        ({"lam_lr": 0.5}, r"lam_lr: 0.0006 -> 0.5\n"),
        ({"num_labels": (5,)}, r"num_labels: \[128000\] -> \[5\]"),
    ],
)
def test_what_differs_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    open_run(tmp_path).close()
    with pytest.raises(UserError, match=message):
        open_run(tmp_path, **changes)


def test_what_may_differ_and_what_is_learned_later(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.add_identity("raft_weights_hash", "a")
    run.close()
    run = open_run(tmp_path, data_dir=Path("elsewhere"), log_every=7, stages="lam", num_labels=(128_000, 5))
    run.add_identity("raft_weights_hash", "a")
    with pytest.raises(UserError, match="another process is writing"):
        open_run(tmp_path)
    run.close()
    run = open_run(tmp_path)
    assert run.args.num_labels == (5, 128_000)  # with the budgets that it had before
    with pytest.raises(UserError, match="was made with another raft_weights_hash: 'a' -> 'b'"):
        run.add_identity("raft_weights_hash", "b")
    run.close()


def test_names_of_variants() -> None:
    names = [runs.variant_name(lapo.Args(lam_lr=value, track=True), lapo.Args()) for value in (6e-4, 0.2)]
    assert names == ["default", "lam-lr=0.2"]
    changes = {"quick": True, "distractors": False, "num_labels": (5, 7), "seed": 3}
    assert runs.variant_name(lapo.Args(**changes), lapo.Args()) == "quick_no-distractors_num-labels=7"
    many = dict.fromkeys(("lam_lr", "policy_lr", "decoder_lr", "weight_decay", "lam_epochs", "lam_clip"), 1 / 3)
    names = {runs.variant_name(lapo.Args(**many, policy_clip=clip), lapo.Args()) for clip in (1 / 3, 1 / 7)}
    assert len(names) == 2 and all(len(name) == 180 for name in names)  # cut, and still told apart


def test_a_loss_that_is_not_finite_stops_the_run(planted_dir: Path, tmp_path: Path) -> None:
    changes = {"log_every": 1, "checkpoint_every": 1, "lam_lr": 1e30}
    module, args, model = build("lapo", runs_dir=tmp_path, **changes)
    pattern = r"lam: loss or weights are not finite at update \d+, episodes \[\d.*\]\. .* a lower --lam-lr may help"
    with pytest.raises(UserError, match=pattern) as error:
        lam_training(module, args, model, planted_dir, 5)
    directory = run_dir("lapo", tmp_path)
    saved = list(directory.glob("checkpoints/*.pt"))
    assert ("checkpoints" in str(error.value)) == bool(saved) and not (directory / "lam.pt").exists()
    for path in saved:  # what was kept is good
        assert all(value.isfinite().all() for value in torch.load(path, weights_only=True)["model"].values())
    run = open_run(tmp_path / "other")
    assert "a lower --decoder-lr may help" in str(run.not_finite("decoder-5", 3, [1], 0))
    run.close()


def test_a_damaged_or_lost_stage_is_named(tmp_path: Path) -> None:
    """What was made from a stage is not used with another outcome of it; removing all of it trains from there."""
    run = open_run(tmp_path)
    for stage in ("decoder", "policy", "lam"):  # whatever the clock said when they were written
        run.finish(stage, 1, {"cost": {}})
    run.save("decoder-5", 3, {})  # which also goes on from the policy
    left = run.save("lam", 1, {})  # as by a process that was killed right after it had finished the stage
    run.close()
    path = run.dir / "policy.pt"
    path.write_bytes(path.read_bytes()[:-100])
    run = open_run(tmp_path)
    assert run.finished("lam") and not left.exists()
    later = "checkpoints/decoder-5-00000003.pt, decoder.pt"
    with pytest.raises(UserError, match=rf"{path} is damaged; remove policy.pt, {later}, then"):
        run.finished("policy")
    path.unlink()
    assert run.finished("policy") is None
    with pytest.raises(UserError, match=rf"policy.pt is missing, but {later} were made from it"):
        run.restore("policy")
    for name in later.split(", "):
        (run.dir / name).unlink()
    assert run.restore("policy") is None
    for budget in ("", "-5"):
        run.finish(f"decoder{budget}", 1, {"cost": {}})
        run.once(f"rollout{budget}", lambda: {})
    run.close()
    (run.dir / "decoder-5.pt").write_bytes(b"damaged")
    run = open_run(tmp_path)
    with pytest.raises(UserError, match=r"damaged; remove decoder-5.pt, tables/rollout-5.pt, then"):  # of this budget
        run.finished("decoder-5")
    run.close()


def test_further_stages_and_budgets_of_a_finished_run(whole_run: Whole, data_dir: Path, tmp_path: Path) -> None:
    """Only what is missing is trained and rolled out; the result is that of a run with all of it from the start.

    Probing on the way changes nothing, and at the end of the stage gives what the probe after it gives.
    """
    directory, results, written = run_dir("masklam", tmp_path), [], []
    first = {"num_labels": (20,), "stages": "lam", "probe_at": (3, UPDATES["lam"], 99)}
    for changes in (first, {"num_labels": (20,)}, {}, {"num_labels": (20,)}):
        done = finish("masklam", data_dir, tmp_path, **changes)
        assert done.returncode == 0, done.stderr
        assert not written or "masklam lam:" not in done.stderr
        assert written or "warning: --probe-at 99: stage 1 has 8 updates" in done.stderr
        results.append(result_of(directory))
        written.append({path.stem: path.stat().st_mtime_ns for path in directory.glob("*.pt")})
    for before, after, new in zip(written, written[1:], ({"policy", "decoder"}, {"decoder-8"}, set())):
        assert after == before | {name: after[name] for name in new}
    assert results[0]["metrics"] == {name: results[1]["metrics"][name] for name in ("eval/nmse", "eval/nmse_untrained")}
    assert results[2]["decoders"][1:] == results[1]["decoders"] and results[0]["decoders"] == []
    assert results[2]["metrics"] == results[1]["metrics"] and results[3] == results[2]
    assert results[2]["stages"]["rollout"] == results[1]["stages"]["rollout"]  # what it took then
    probed = {line["step"]: line["lam/nmse"] for line in metrics(directory) if "lam/nmse" in line}
    assert probed.keys() == {3, UPDATES["lam"]} and probed[3] != probed[UPDATES["lam"]]
    assert probed[UPDATES["lam"]] == pytest.approx(results[0]["metrics"]["eval/nmse"], rel=1e-6)
    assert "finished before" in done.stdout  # fewer budgets than it has
    check_same(directory, whole_run("masklam"))


def test_the_chosen_slot_and_the_cost_of_flow_stay(whole_run: Whole, data_dir: Path, tmp_path: Path) -> None:
    """Where a run goes on, also if another slot would be chosen now, and though no flow is computed any more."""
    for script in ("lapo_slots", "laof"):
        directory = copy_run(whole_run(script), tmp_path, ("decoder.pt",))
        result = store.read_json(directory / "result.json")
        result["decoders"], result["seconds"]["flow"] = [], 1234.5
        if script == "lapo_slots":
            best = result["slots"]["selected"]
            result["slots"]["selected"] = other = 1 + best % len(result["slots"]["probing"])
        store.write_json(directory / "result.json", result, with_hash=True)
        done = finish(script, data_dir, tmp_path)
        assert done.returncode == 0, done.stderr
    assert result_of(directory)["seconds"]["flow"] == 1234.5
    slots = result_of(run_dir("lapo_slots", tmp_path))["slots"]
    assert slots["selected"] == other and min(slots["probing"], key=lambda each: each["nmse"])["slot"] == best


def test_a_budget_alone_gives_the_same_decoder(whole_run: Whole, data_dir: Path, tmp_path: Path) -> None:
    """But for rounding, as its features are computed in other batches; MaskLAM's other stages use no labels."""
    without = ("result.json", "decoder.pt", "decoder-8.pt")
    directory = copy_run(whole_run("masklam"), tmp_path, without, num_labels=[8])
    done = finish("masklam", data_dir, tmp_path, num_labels=(8,))
    assert done.returncode == 0, done.stderr
    here, there = weights(directory), weights(whole_run("masklam"))
    for name in (name for name in here if name.startswith("decoder.")):
        torch.testing.assert_close(here[name], there[name.replace("decoder.", "decoder-8.", 1)], rtol=1e-4, atol=1e-6)


def test_track_sends_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wandb offline: its id is kept for a resume, in a file and in what is saved."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = open_run(tmp_path, track=True)
    run.start_wandb()
    run.log("lam", 1, {"lam/loss": 1.0})
    path = run.save("lam", 1, {})
    run.close()
    identity = (run.dir / "wandb_id").read_text()
    assert list(run.dir.glob(f"wandb/*{identity}*"))
    assert torch.load(path, weights_only=True)["wandb_id"] == identity
