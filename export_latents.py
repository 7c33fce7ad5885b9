"""Write the latent actions that a finished run infers in a dataset, also in one that it was not trained on.

    python export_latents.py runs/masklam/mine/default/seed1 --data others

For each split of data/others, in runs/masklam/mine/default/seed1/latents/others: <split>.npz with `z`, `episode`,
`frame` and, of imported videos, `source` and `seconds` of all transitions, and <split>.png, principal components over
time. Of models that predict pixels also transfer.png and .gif, one episode's latent actions applied to another's frame.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from common import evaluation, recorded, report, runs
from common.cli import Count, Name, Progress, UserError, cli
from common.dataset import Dataset
from common.store import read_json


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional] = tyro.MISSING
    """directory of a finished run, which ends in seed1 or the like"""
    data: Name = ""
    """name of the dataset; empty: that of the run"""
    data_dir: Path | None = None
    """folder of the datasets; None: that of the run"""
    mask_source: Name = ""
    """masks that a model sees which sees masks, by name; empty: those of the run's name"""
    split: Literal["both", "train", "test"] = "both"
    """which splits"""
    batch_size: Count = 512
    """transitions at a time"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where the model runs; auto takes the GPU if there is one"""


def read_run(folder: Path) -> report.Run:
    """The finished run in a folder, wherever it was moved to. UserError if there is none."""
    try:
        result = read_json(folder / "result.json", keys=("script", "env", "variant", "seed", "args"))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: name the directory of a finished run, as .../seed1") from error
    names = {name: result[name] for name in ("script", "env", "variant", "seed", "args")}
    return report.Run(folder, **names, result=result)


def open_split(module: Any, run_args: Any, split: str) -> Dataset:
    """A split as the model sees it; what only training needs, such as actions, may be absent."""
    if "masks" in module.input_fields(run_args):
        return module.open_split(run_args, split)
    return Dataset(run_args.data_dir, run_args.env, split, "distractor" if run_args.distractors else "clean")


def export(args: Args, dataset: Dataset, module: Any, run_args: Any, model: torch.nn.Module, folder: Path) -> None:
    """Writes the files of a split and prints where they are."""
    device, seen = next(model.parameters()).device, module.input_fields(run_args)
    windows = {"batch_size": args.batch_size, "device": device, "max_offset": 1, "fields": seen}
    latents = []
    with Progress(f"latents {dataset.env} {dataset.split}", dataset.num_transitions, "transitions") as progress:
        for z, _ in evaluation.outputs(partial(module.encode, model, args=run_args), dataset, **windows):
            latents.append(z.cpu())
            progress.update(len(z))
    drawn = recorded.save_latents(folder, dataset, torch.cat(latents))
    if dataset.split == "test" and hasattr(model, "predict"):
        inputs = partial(module.model_inputs, args=run_args)
        drawn += recorded.transfer(folder, model, inputs, dataset, seen, device)
    print(f"{folder / dataset.split}.npz, {', '.join(str(path) for path in drawn)}")


def main(args: Args) -> None:
    device = runs.choose_device(args.device)
    run = read_run(args.run)
    module, run_args, model = report.load_model(run)
    model.to(device, memory_format=torch.channels_last)
    plan = run.result["dataset"]["train"]["plan"]
    size, rate = plan["image_size"], plan.get("fps")
    if "frames" not in module.input_fields(run_args):
        raise UserError(f"{args.run}: {module.__name__}.py does not see frames but slots, which only its own run has")
    changes = {"env": args.data or run_args.env, "data_dir": args.data_dir or run_args.data_dir}
    if args.mask_source:
        if "masks" not in module.input_fields(run_args):
            raise UserError(f"--mask-source: the model of {module.__name__}.py does not see masks")
        changes["mask_source"] = args.mask_source
    run_args = replace(run_args, **changes)
    splits = ("train", "test") if args.split == "both" else (args.split,)
    datasets = [open_split(module, run_args, split) for split in splits]
    name = changes["env"] + (f"-{args.mask_source}" if args.mask_source else "")
    for dataset in datasets:
        if dataset.image_size != size:
            raise UserError(
                f"{dataset.folder}: frames of {dataset.image_size} pixels; the model was trained on {size} pixels, so "
                f"import or make the dataset in that size"
            )
        if rate != dataset.plan.get("fps"):
            rates = " and ".join(str(each or "unknown") for each in (rate, dataset.plan.get("fps")))
            print(f"warning: {dataset.folder}: frames per second in training and here: {rates}", file=sys.stderr)
    for dataset in datasets:
        export(args, dataset, module, run_args, model, args.run / "latents" / name)


if __name__ == "__main__":
    cli(main, Args())
