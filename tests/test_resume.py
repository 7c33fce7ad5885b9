"""Runs that are stopped, killed or damaged and then repeated: exact results, clear errors, nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import methods
import numpy as np
import planted
import pytest
import torch

from common.dataset import Dataset

ROOT = Path(__file__).parents[1]
TINY = "--policy-scale 1 --latent-dim 16 --batch-size 16 --num-labels 40 --log-every 1".split()
TINY += "--checkpoint-every 3 --lam-updates 10 --policy-updates 10 --decoder-updates 40 --device cpu".split()
TINY += "--eval-episodes 3 --eval-envs 1 --eval-steps 20".split()
STAGES = ("lam", "bc", "decoder")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted set at the size of the real frames, so that the decoded policy can act in the real environment."""
    return planted.write(tmp_path_factory.mktemp("planted"), train=3, test=2, length=20, size=64)


def command(script: str, data: Path, runs: Path, *more: str) -> list[str]:
    flags = ["--data-dir", str(data), "--runs-dir", str(runs), "--variant", "test", *TINY]
    return [sys.executable, f"{script}.py", *flags, *methods.flags(script, data), *more]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def finish(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, env=environment())


def run_dir(script: str, runs: Path) -> Path:
    return runs / script / "cheetah-run/test/seed1"


def until(process: subprocess.Popen, directory: Path, stage: str, step: int, timeout: float = 300) -> None:
    """Waits until a run has logged an update of a stage, or has written the file that `stage` names."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if (directory / stage).is_file():
            return
        path = directory / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                continue
            if values["stage"] == stage and values["step"] >= step:
                return
        time.sleep(0.01)
    raise AssertionError(f"{stage} did not reach update {step}: {process.communicate()}")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for stage in (*STAGES, "slots") if (directory / "slots.pt").exists() else STAGES:
        state = torch.load(directory / f"{stage}.pt", weights_only=True)
        for part in ("model", "probe"):
            found |= {f"{stage}.{part}.{name}": value for name, value in (state[part] or {}).items()}
    return found


def losses(directory: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line.get(f"{line['stage']}/loss")) for line in lines]


def whole_run(script: str, data_dir: Path, runs: Path) -> tuple[str, Path]:
    done = finish(script, data_dir, runs)
    assert done.returncode == 0, done.stderr
    return script, run_dir(script, runs)


@pytest.fixture(scope="module")
def undisturbed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A whole run of MaskLAM: the script's name and the run directory."""
    return whole_run("masklam", data_dir, tmp_path_factory.mktemp("masklam"))


@pytest.fixture(scope="module")
def undisturbed_lapo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return whole_run("lapo", data_dir, tmp_path_factory.mktemp("lapo"))


@pytest.fixture(scope="module")
def undisturbed_slots(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return whole_run("lapo_slots", data_dir, tmp_path_factory.mktemp("lapo_slots"))


@pytest.fixture(scope="module", params=["laom_labels", "laof"])
def undisturbed_baseline(
    request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    return whole_run(request.param, data_dir, tmp_path_factory.mktemp(request.param))


# Pictures that a method draws, and what takes time beside the stages of every method.
PICTURES = {
    "lapo": {"world_model.png"},
    "laom_labels": {"world_model.png", "augmentations.png"},
    "laof": {"world_model.png", "flow.png"},
    "lapo_slots": {"slots.png"},
    "masklam": {"world_model.png"},
}
STAGE_COSTS = {"laof": {"flow"}, "lapo_slots": {"dino", "slots", "slots_train", "slots_test"}}


def test_end_to_end(undisturbed, data_dir: Path) -> None:
    check_finished(*undisturbed, data_dir)


def test_end_to_end_lapo(undisturbed_lapo, data_dir: Path) -> None:
    check_finished(*undisturbed_lapo, data_dir)


def test_end_to_end_slots(undisturbed_slots, data_dir: Path) -> None:
    check_finished(*undisturbed_slots, data_dir)


def test_end_to_end_baselines(undisturbed_baseline, data_dir: Path) -> None:
    check_finished(*undisturbed_baseline, data_dir)


def check_finished(script: str, directory: Path, data_dir: Path) -> None:
    files = {path.name for path in directory.iterdir()}
    assert files >= {
        "args.json",
        "metrics.jsonl",
        "result.json",
        "curves.png",
        "lam.pt",
        "bc.pt",
        "decoder.pt",
        *PICTURES[script],
    }
    assert not [name for name in files if ".part" in name or name.endswith(".npy")]
    assert not list((directory / "checkpoints").iterdir())
    result = json.loads((directory / "result.json").read_text())
    assert result["script"] == script and result["labelled_transitions"] == 40
    train_set = Dataset(data_dir, "cheetah-run", "train")
    listed = [train_set.episode_start[int(e)] + np.arange(n) for e, n in result["labelled_episodes"].items()]
    assert np.array_equal(np.concatenate(listed), train_set.labelled(40, seed=1))
    assert {Path(path).name for path in result["pictures"]} == {name for name in files if name.endswith(".png")}
    for name in ("eval/nmse", "eval/nmse_untrained", "eval/return", "eval/normalised_dataset"):
        assert isinstance(result["metrics"][name], float)
    stages = {"lam", "labels", "bc", "features", "decoder", "probe", "rollout"}
    assert set(result["seconds"]) == stages | STAGE_COSTS.get(script, set())
    if script == "laom_labels":  # the moving average moved, and is not the encoder
        model = torch.load(directory / "lam.pt", weights_only=True)["model"]
        pairs = [(value, model[name.replace("target", "encoder")]) for name, value in model.items() if "target" in name]
        assert pairs and all(0 < (a - b).abs().max() < 0.1 for a, b in pairs)
    assert result["rollout"]["lengths"] == [20, 20, 20] and len(set(result["rollout"]["returns"])) == 3
    assert result["peak_memory_gib"] > 0 and result["parameters"]["lam"] > 0
    assert len(result["dataset"]["train"]["hash"]) == 64 and torch.__version__.startswith(result["versions"]["torch"])
    logged = losses(directory)
    assert [step for stage, step, _ in logged if stage == "lam"] == list(range(1, 11))
    for stage in STAGES:
        first, *_, last = [loss for name, _, loss in logged if name == stage]
        assert last < first, stage


@pytest.mark.parametrize(("stage", "step"), [("lam", 2), ("lam", 10), ("bc", 7), ("decoder", 20)])
def test_killed_and_repeated_is_bit_identical(
    undisturbed, data_dir: Path, tmp_path: Path, stage: str, step: int
) -> None:
    """SIGKILL before the first checkpoint, between checkpoints, across the stage boundary, and in each stage."""
    check_killed(*undisturbed, data_dir, tmp_path, stage, step)


def test_baselines_killed_and_repeated_are_bit_identical(undisturbed_baseline, data_dir: Path, tmp_path: Path) -> None:
    """One run killed at least four times: twice in the latent action model's training (moving average, random
    transformations), and in each other stage."""
    script, reference = undisturbed_baseline
    for stage, step in (("lam", 5), ("lam", 8), ("bc", 7), ("decoder", 20)):
        kill(script, data_dir, tmp_path, stage, step)
    check_repeated(script, reference, data_dir, tmp_path)


def test_slots_killed_and_repeated_are_bit_identical(undisturbed_slots, data_dir: Path, tmp_path: Path) -> None:
    """One run killed five times, once in each stage: in the second before the slot is selected."""
    script, reference = undisturbed_slots
    for stage, step in (("slots", 5), ("slots_train.npy", 0), ("lam", 5), ("bc", 7), ("decoder", 20)):
        kill(script, data_dir, tmp_path, stage, step)
        assert (run_dir(script, tmp_path) / "slots.json").exists() == (not stage.startswith("slots"))
    check_repeated(script, reference, data_dir, tmp_path)


def test_slots_without_files_of_features(undisturbed_slots, data_dir: Path, tmp_path: Path) -> None:
    """--no-dino-cache computes the features in every stage that needs them: the same numbers but for rounding."""
    script, reference = undisturbed_slots
    done = finish(script, data_dir, tmp_path, "--no-dino-cache")
    assert done.returncode == 0 and "dino of" not in done.stdout, done.stderr
    directory = run_dir(script, tmp_path)
    found, expected = (json.loads((path / "result.json").read_text()) for path in (directory, reference))
    assert found["slots"]["selected"] == expected["slots"]["selected"]
    assert found["metrics"]["eval/nmse"] == pytest.approx(expected["metrics"]["eval/nmse"], rel=0.02)
    for line, other in zip(losses(directory), losses(reference)):
        assert line[:2] == other[:2]
        if other[2] is not None:  # the evaluation has no loss
            assert line[2] == pytest.approx(other[2], rel=0.02)


def test_too_few_labels_for_the_slots_are_refused_first(data_dir: Path, tmp_path: Path) -> None:
    done = finish("lapo_slots", data_dir, tmp_path, "--num-labels", "20")
    assert done.returncode == 1 and "one episode" in done.stderr and "updates" not in done.stdout


def held(script: str, source: Path, data_dir: Path, runs: Path, *more: str) -> subprocess.CompletedProcess:
    """A run under --variant held that takes its latent action model from `source`."""
    return finish(script, data_dir, runs, "--variant", "held", "--lam-from", str(source), *more)


def check_held_fixed(script: str, source: Path, data_dir: Path, runs: Path) -> None:
    """Another label budget: the same latent action model and policy, bit for bit, and another decoder."""
    done = held(script, source, data_dir, runs, "--num-labels", "20", "--eval-episodes", "1")
    assert done.returncode == 0, done.stderr
    assert " lam:" not in done.stdout and " bc:" not in done.stdout and " decoder:" in done.stdout
    directory = runs / script / "cheetah-run/held/seed1"
    expected, found = weights(source), weights(directory)
    assert expected.keys() == found.keys()
    same = {name: torch.equal(expected[name], found[name]) for name in expected}
    assert all(equal for name, equal in same.items() if not name.startswith("decoder."))
    assert not any(equal for name, equal in same.items() if name.startswith("decoder.model") and "weight" in name)
    there, here = (json.loads((path / "result.json").read_text()) for path in (source, directory))
    assert here["labelled_transitions"] == 20 and here["metrics"]["eval/nmse"] == there["metrics"]["eval/nmse"]
    assert set(here["lam_from"]["stages"]) == set(there["stages"]) & {"slots", "lam", "bc"}
    assert here["lam_from"]["num_labels"] == 40 and here["lam_from"]["commit"] == there["commit"]
    if script == "lapo_slots":  # chosen with the labels of the other run: 20 of one episode would not suffice
        assert here["slots"]["selected"] == there["slots"]["selected"]


def test_lam_held_fixed(undisturbed, data_dir: Path, tmp_path: Path) -> None:
    check_held_fixed(*undisturbed, data_dir, tmp_path)
    again = held(*undisturbed, data_dir, tmp_path, "--num-labels", "20", "--eval-episodes", "1")
    assert again.returncode == 0 and "finished before" in again.stdout


def test_lam_held_fixed_slots(undisturbed_slots, data_dir: Path, tmp_path: Path) -> None:
    check_held_fixed(*undisturbed_slots, data_dir, tmp_path)


def test_lam_held_fixed_baselines(undisturbed_baseline, data_dir: Path, tmp_path: Path) -> None:
    check_held_fixed(*undisturbed_baseline, data_dir, tmp_path)


def test_a_held_run_outlives_its_source(undisturbed_lapo, data_dir: Path, tmp_path: Path) -> None:
    """Without --variant: named after the source and what may differ; killed, repeated, finished without the source."""
    script, source = undisturbed_lapo
    copied = tmp_path / "runs/lapo/cheetah-run/a-name/seed1"
    shutil.copytree(source, copied)
    words = [
        *command(script, data_dir, tmp_path / "held"),
        "--variant",
        "",
        "--lam-from",
        str(copied),
        "--num-labels",
        "20",
    ]
    directory = tmp_path / "held/lapo/cheetah-run"
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    name = "lam-from=a-name_policy-scale=1_policy-updates=10_decoder-updates=40_num-labels=20"
    name += "_eval-episodes=3_eval-steps=20"
    until(process, directory / name / "seed1", "decoder", 5)
    process.kill()
    process.wait()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert [path.name for path in directory.iterdir()] == [name]
    with open(copied / "lam.pt", "ab") as file:  # another model under the same name
        file.write(b"x")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and "lam_from_hash" in done.stderr
    shutil.rmtree(copied)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and "finished before" in done.stdout


def test_a_reader_that_has_had_enough_is_no_traceback() -> None:
    code = (
        "import dataclasses, sys; from common import runs; sys.argv = ['x.py']\n@dataclasses.dataclass\nclass Args:\n"
    )
    code += "    n: int = 1\nruns.cli(lambda args: [print('line' * 99, flush=True) for _ in range(9999)], Args())"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE and process.stderr.read() == b""


def test_long_names_of_variants_are_cut() -> None:
    import lapo
    from common import runs

    names = {runs.variant_name(lapo.Args(lam_lr=value, policy_lr=value), lapo.Args()) for value in (0.1, 0.2)}
    assert names == {"lam-lr=0.1_policy-lr=0.1", "lam-lr=0.2_policy-lr=0.2"}
    source = Path("runs/lapo/cheetah-run") / ("x" * 200) / "seed1"
    names = {runs.variant_name(lapo.Args(lam_from=source, num_labels=n), lapo.Args()) for n in (1, 2)}
    assert len(names) == 2 and all(len(name) == 180 for name in names)


def test_lam_held_fixed_with_another_policy(undisturbed_lapo, data_dir: Path, tmp_path: Path) -> None:
    script, source = undisturbed_lapo
    done = held(script, source, data_dir, tmp_path, "--policy-updates", "5", "--eval-episodes", "1")
    assert done.returncode == 0, done.stderr
    assert " lam:" not in done.stdout and " bc: 5/5" in done.stdout
    directory = tmp_path / "lapo/cheetah-run/held/seed1"
    assert json.loads((directory / "result.json").read_text())["lam_from"]["stages"] == ["lam"]
    expected, found = weights(source), weights(directory)
    assert all(torch.equal(expected[name], found[name]) for name in expected if name.startswith("lam."))
    assert not any(torch.equal(expected[name], found[name]) for name in expected if name.startswith("bc.model"))


def test_lam_from_refuses_what_differs_by_name(undisturbed, undisturbed_lapo, data_dir: Path, tmp_path: Path) -> None:
    script, source = undisturbed
    done = held(script, source, data_dir, tmp_path, "--no-loss-mask", "--seed", "2", "--eval-episodes", "1")
    assert done.returncode == 1
    assert "loss_mask: True there, False now" in done.stderr and "seed: 1 there, 2 now" in done.stderr
    assert "eval_episodes" not in done.stderr
    done = held("lapo", source, data_dir, tmp_path)
    assert done.returncode == 1 and "a run of masklam.py, not of lapo.py" in done.stderr
    done = held(script, source.parent, data_dir, tmp_path)
    assert done.returncode == 1 and "no finished run here" in done.stderr
    other = planted.write(tmp_path / "other", train=3, test=2, length=21, size=64)
    done = held(script, source, other, tmp_path)
    assert done.returncode == 1 and "train_hash" in done.stderr
    copy = tmp_path / "copy/seed1"
    shutil.copytree(source, copy)
    (copy / "lam.pt").unlink()
    done = held(script, copy, data_dir, tmp_path)
    assert done.returncode == 1 and "lam.pt is gone" in done.stderr
    assert not (tmp_path / "masklam/cheetah-run/held/seed1/args.json").exists()


def test_lam_from_is_part_of_the_run(undisturbed_lapo, data_dir: Path, tmp_path: Path) -> None:
    """A run that began on its own is not mixed with another one's stages, and the other way round."""
    script, source = undisturbed_lapo
    directory = tmp_path / "lapo/cheetah-run/held/seed1"
    shutil.copytree(source, directory)
    (directory / "result.json").unlink()
    values = json.loads((directory / "args.json").read_text()) | {"variant": "held"}
    (directory / "args.json").write_text(json.dumps(values))
    done = held(script, source, data_dir, tmp_path)
    assert done.returncode == 1 and "lam_from_hash: None there" in done.stderr
    (directory / "args.json").write_text(json.dumps(values | {"lam_from_hash": "a"}))
    done = finish(script, data_dir, tmp_path, "--variant", "held")
    assert done.returncode == 1 and "lam_from_hash: 'a' there, None now" in done.stderr


def check_killed(script: str, reference: Path, data_dir: Path, runs: Path, stage: str, step: int) -> None:
    kill(script, data_dir, runs, stage, step)
    check_repeated(script, reference, data_dir, runs)


def kill(script: str, data_dir: Path, runs: Path, stage: str, step: int) -> None:
    """Starts a run, or goes on with it, and kills it once it has logged an update."""
    process = subprocess.Popen(
        command(script, data_dir, runs),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until(process, run_dir(script, runs), stage, step)
    process.kill()
    process.wait()
    assert not (run_dir(script, runs) / "result.json").exists()


def check_repeated(script: str, reference: Path, data_dir: Path, runs: Path) -> None:
    """The repeated command ends with the weights, losses and metrics of the undisturbed run."""
    directory = run_dir(script, runs)
    done = finish(script, data_dir, runs)
    assert done.returncode == 0, done.stderr
    expected, found = weights(reference), weights(directory)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert losses(directory) == losses(reference)
    results = [json.loads((path / "result.json").read_text()) for path in (reference, directory)]
    assert results[0]["metrics"] == results[1]["metrics"]
    found = [result.get("slots", {}) for result in results]
    assert all(found[0].get(name) == found[1].get(name) for name in ("selected", "probing", "agent"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_so(data_dir: Path, tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        command("lapo", data_dir, tmp_path, "--lam-updates", "5000", "--checkpoint-every", "1000"),
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    directory = run_dir("lapo", tmp_path)
    until(process, directory, "lam", 2)
    process.send_signal(number)
    message = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number
    assert "the same command goes on" in message
    (path,) = (directory / "checkpoints").glob("lam-*.pt")
    assert int(re.search(r"update (\d+) of 5000", message)[1]) == torch.load(path, weights_only=True)["step"]


@pytest.fixture
def half_done(data_dir: Path, tmp_path: Path) -> Path:
    """A run killed in stage 1 with two checkpoints; returns its runs folder."""
    process = subprocess.Popen(
        command("lapo", data_dir, tmp_path),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(process, run_dir("lapo", tmp_path), "lam", 7)
    process.kill()
    process.wait()
    return tmp_path


def test_a_broken_newest_checkpoint_is_reported_and_the_one_before_used(
    half_done: Path, data_dir: Path, undisturbed_lapo: tuple[str, Path]
) -> None:
    directory = run_dir("lapo", half_done)
    _, newest = sorted((directory / "checkpoints").glob("*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit
    newest.write_bytes(content)
    done = finish("lapo", data_dir, half_done)
    assert done.returncode == 0 and newest.name in done.stderr and "using the checkpoint before it" in done.stderr
    expected, found = weights(undisturbed_lapo[1]), weights(directory)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_other_arguments_are_refused_by_name(half_done: Path, data_dir: Path) -> None:
    done = finish("lapo", data_dir, half_done, "--lam-lr", "0.5")
    assert done.returncode == 1
    assert "lam_lr: 0.0006 there, 0.5 now" in done.stderr and "--variant" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_dataset_is_refused(half_done: Path, tmp_path: Path) -> None:
    other = planted.write(tmp_path / "other", train=3, test=2, length=21, size=64)
    done = finish("lapo", other, half_done)
    assert done.returncode == 1 and "train_hash" in done.stderr


def test_a_second_process_is_refused(half_done: Path, data_dir: Path) -> None:
    first = subprocess.Popen(
        command("lapo", data_dir, half_done),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(first, run_dir("lapo", half_done), "lam", 8)
    done = finish("lapo", data_dir, half_done)
    first.kill()
    first.wait()
    assert done.returncode == 1 and "another process" in done.stderr


@pytest.mark.parametrize("stage", ["lam", "decoder"])
def test_a_loss_that_is_not_finite_stops_the_run(data_dir: Path, tmp_path: Path, stage: str) -> None:
    done = finish("lapo", data_dir, tmp_path, f"--{stage}-lr", "1e30", "--checkpoint-every", "1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(rf"{stage}: loss or weights are not finite at update \d+, episodes \[\d.*\]", done.stderr)
    assert "last good checkpoint" in done.stderr
    for path in run_dir("lapo", tmp_path).glob("checkpoints/*.pt"):  # what was kept is good
        assert all(value.isfinite().all() for value in torch.load(path, weights_only=True)["model"].values())
    assert not (run_dir("lapo", tmp_path) / f"{stage}.pt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "cheetah-rum"], "did you mean"),
        (["--mask-source", "nothing"], "no masks named 'nothing'"),
        (["--num-labels", "1000000"], "--num-labels"),
        (["--occlusion", "2"], "--occlusion"),
        (["--batch-size", "4096"], "batch"),
        (["--batch-size", "0"], "--batch-size is 0, must be at least 1"),
        (["--eval-episodes", "0"], "--eval-episodes is 0"),
        (["--clips-dir", "/nowhere/at/all"], "--clips-dir"),
        (["--env", "walker-run"], "make_dataset.py --env walker-run"),
    ],
)
def test_bad_input_is_one_clear_message(data_dir: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    done = finish("masklam", data_dir, tmp_path, *flags)
    assert done.returncode == 1, done.stderr
    assert message.lower() in done.stderr.lower() and "Traceback" not in done.stderr


def test_unknown_flag(data_dir: Path, tmp_path: Path) -> None:
    done = finish("lapo", data_dir, tmp_path, "--mask-source", "gt")
    assert done.returncode == 2 and "mask-source" in done.stderr + done.stdout


def test_full_disk(data_dir: Path, tmp_path: Path) -> None:
    """A file size limit acts like a full disk: one message, no half-written checkpoint."""
    limited = ["bash", "-c", 'ulimit -f 400; trap "" XFSZ; exec "$@"', "-", *command("lapo", data_dir, tmp_path)]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr
    assert "the disk is full" in done.stderr and "Traceback" not in done.stderr
    directory = run_dir("lapo", tmp_path)
    assert not list(directory.rglob("*.part*")) and not list(directory.glob("lam.pt"))
    assert finish("lapo", data_dir, tmp_path).returncode == 0  # with room, the same command ends well


def test_a_damaged_or_lost_stage_is_named(undisturbed, data_dir: Path, tmp_path: Path) -> None:
    """What was made from a stage is not used with another outcome of it; removing all of it trains from there."""
    script, reference = undisturbed
    directory = run_dir(script, tmp_path)
    shutil.copytree(reference, directory)
    (directory / "result.json").unlink()
    path = directory / "bc.pt"
    path.write_bytes(path.read_bytes()[:-100])
    done = finish(script, data_dir, tmp_path)
    assert done.returncode == 1 and str(path) in done.stderr and "remove it and the later ones" in done.stderr
    path.unlink()
    done = finish(script, data_dir, tmp_path)
    assert done.returncode == 1 and "decoder.pt" in done.stderr and "made from it" in done.stderr
    (directory / "decoder.pt").unlink()
    assert finish(script, data_dir, tmp_path).returncode == 0
    expected, found = weights(reference), weights(directory)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_signal_during_the_evaluation(undisturbed, data_dir: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal; the run says that it can go on, without a traceback."""
    script, reference = undisturbed
    directory = run_dir(script, tmp_path)
    shutil.copytree(reference, directory)
    (directory / "result.json").unlink()
    more = ("--eval-envs", "2", "--eval-episodes", "3")
    process = subprocess.Popen(
        command(script, data_dir, tmp_path, *more), cwd=ROOT, env=environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    for line in process.stdout:
        if "labels" in line:
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    message = process.communicate(timeout=120)[1]
    assert process.returncode in (0, 128 + signal.SIGINT), message
    assert "Traceback" not in message
    assert finish(script, data_dir, tmp_path).returncode == 0


def test_track_sends_the_metrics(data_dir: Path, tmp_path: Path) -> None:
    """With wandb offline: the run ends as without it, and its id is kept for a resume."""
    pytest.importorskip("wandb")
    done = subprocess.run(
        command("lapo", data_dir, tmp_path, "--track"), cwd=ROOT, capture_output=True, text=True,
        env=environment() | {"WANDB_MODE": "offline"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    directory = run_dir("lapo", tmp_path)
    identity = (directory / "wandb_id").read_text()
    assert list(directory.glob(f"wandb/*{identity}*"))
    assert torch.load(directory / "lam.pt", weights_only=True)["wandb_id"] == identity
