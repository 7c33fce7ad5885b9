"""One table from finished runs: NMSE with its untrained control, return, success rate, seconds; and where pictures are.

python -m benchmarks.table runs/lapo/cheetah-run/quick/seed1 runs/masklam/cheetah-run/quick/seed1
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from common import runs
from common.errors import UserError


@dataclass
class Args:
    run_dirs: tyro.conf.Positional[list[Path]] = field(default_factory=list)
    """run directories with a result.json"""
    out: Path | None = None
    """also write the table to this file, as Markdown"""
    json: Path | None = None
    """also write metrics, arguments, data, commit and machine of every run to this file"""


def read_result(run_dir: Path) -> dict[str, Any]:
    """The result of a finished run. Raises UserError if there is none."""
    path = run_dir / "result.json"
    if not path.exists():
        raise UserError(f"{path} does not exist: the run is not finished; repeat its command")
    return json.loads(path.read_text())


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, one line per run."""
    stages = list(dict.fromkeys(stage for result in results for stage in result["seconds"]))
    head = ["method", "env", "variant", "seed", "NMSE", "untrained", "return", "success", "of the paper's expert"]
    lines = [head + [f"{stage} s" for stage in stages]]
    for result in results:
        metrics = result["metrics"]
        share, success = metrics["eval/normalised_paper"], metrics.get("eval/success_rate")
        lines.append(
            [result["script"], result["env"], result["variant"], str(result["seed"])]
            + [f"{metrics['eval/nmse']:.3f}", f"{metrics['eval/nmse_untrained']:.3f}"]
            + [f"{metrics['eval/return']:.1f}", "-" if success is None else f"{success:.2f}"]
            + ["-" if share is None else f"{100 * share:.1f}%"]
            + [f"{result['seconds'].get(stage, float('nan')):.0f}" for stage in stages]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def over_seeds(results: list[dict[str, Any]]) -> str:
    """NMSE, mean and deviation over the seeds of each method, environment and variant; empty for single seeds."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        groups.setdefault((result["script"], result["env"], result["variant"]), []).append(
            result["metrics"]["eval/nmse"]
        )
    return "\n".join(
        f"{' '.join(name)}: NMSE {statistics.mean(nmse):.3f} +- {statistics.stdev(nmse):.3f} over {len(nmse)} seeds"
        for name, nmse in groups.items()
        if len(nmse) > 1
    )


def main(args: Args) -> None:
    if not args.run_dirs:
        raise UserError("name at least one run directory, such as runs/masklam/cheetah-run/quick/seed1")
    results = [read_result(run_dir) for run_dir in args.run_dirs]
    text = "\n\n".join(part for part in (table(results), over_seeds(results)) if part)
    print(text)
    for result in results:
        for picture in result["pictures"]:
            print(picture)
    if args.out:
        with runs.atomic_path(args.out) as temporary:
            temporary.write_text(text + "\n")
    if args.json:
        for result in results:
            for key in ("rollout", "pictures", "labelled_episodes"):
                result.pop(key)
            for key in (
                "data_dir",
                "runs_dir",
                "clips_dir",
                "raft_checkpoint",
                "dino_checkpoint",
            ):  # where things lie on one machine says nothing
                result["args"].pop(key, None)
        runs.write_json(args.json, results)


if __name__ == "__main__":
    runs.cli(main, Args())
