"""`swell sweep`: many trials of one script, as elastic jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import connect, home_option, json_option, new_table, print_json, print_rich

if TYPE_CHECKING:
    from swell.sweep.spec import Sweep
    from swell.sweep.study import Study, Trial

EPILOG = """\b
A sweep file has three tables: [job] with the fields of a job file, [sweep] with metric, direction, trials,
parallel, sampler (tpe, random, grid), pruner (halving, median, none), warmup and seed, and [parameters].
Each parameter is given to the script as --NAME VALUE. docs/guides/sweeps.md has an example.

\b
Example:
  swell sweep sweep.toml --trials 24 --plot sweep.svg
"""


@click.command(epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--trials", type=click.IntRange(1), help="How many trials, instead of the file's number.")
@click.option("--parallel", type=click.IntRange(1), help="Trials at a time [default: the cluster's slots].")
@click.option("--resume", is_flag=True, help="Go on with the sweep that is in the study's file.")
@click.option(
    "--study",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where Optuna keeps the trials [default: FILE with the suffix .db].",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw all trials into an SVG file."
)
@json_option
@home_option
def sweep(
    file: Path,
    trials: int | None,
    parallel: int | None,
    resume: bool,
    path: Path | None,
    plot: Path | None,
    as_json: bool,
    home: str | None,
) -> None:
    """Search for good hyper-parameters with the sweep in FILE. Trials grow as others are given up.

    Everything is on disk: a sweep that was stopped goes on with --resume, and no finished trial is lost.
    Jobs that were running when the sweep was stopped have gone on meanwhile.
    """
    from swell.sweep.driver import Driver
    from swell.sweep.study import Study

    script, options, wanted = read_sweep(file, trials)
    path = path or file.with_suffix(".db")
    with connect(home) as client:
        slots = sum(node.gpus for node in client.nodes()) or 1
        study = Study(path, wanted, fresh=not resume)
        told = _Teller(wanted, quiet=as_json)
        driver = Driver(
            client,
            study,
            wanted,
            script,
            options,
            parallel=parallel or wanted.parallel or slots,
            notify=told,
        )
        try:
            driver.run()
        except KeyboardInterrupt:
            click.echo(
                f"\nStopped; jobs under way go on. Go on: swell sweep {file} --resume"
                + ("" if path == file.with_suffix(".db") else f" --study {path}"),
                err=True,
            )
            raise
    if plot is not None:
        plot.write_text(draw(study, wanted), encoding="utf-8")
    best = study.best()
    if as_json:
        print_json(
            {
                "best": None if best is None else best.as_dict(),
                "trials": [trial.as_dict() for trial in study.trials()],
            }
        )
        return
    _show(study, wanted)


def read_sweep(file: Path, trials: int | None = None) -> tuple[str, dict[str, Any], Sweep]:
    """Script, options of its job, and the sweep in a file."""
    from swell.cli.submit import job_of, load
    from swell.domain import InputError
    from swell.sweep.spec import Sweep

    tables = load(file)
    for name in tables:
        if name not in ("job", "sweep", "parameters"):
            raise InputError(
                f"{file}: there is no table '{name}'; allowed are job, sweep and parameters",
                field=name,
            )
    if not isinstance(tables.get("job"), dict):
        raise InputError(f'{file}: add a table [job] with at least script = "train.py"', field="job")
    script, options = job_of(tables["job"], file)
    if options.get("deadline_s") is not None or options.get("within_s") is not None:
        raise InputError(
            f"{file}: job.deadline: trials are best-effort jobs; leave it out", field="job.deadline"
        )
    given = tables.get("sweep") or {}
    if trials is not None and isinstance(given, dict):
        given = given | {"trials": trials}
    try:
        return script, dict(options), Sweep.of_tables(given, tables.get("parameters"))
    except InputError as error:
        raise InputError(f"{file}: {error}", field=error.field) from error


class _Teller:
    """Says what happens to trials, a line each."""

    def __init__(self, sweep: Sweep, *, quiet: bool) -> None:
        self._metric = sweep.metric
        self._quiet = quiet

    def __call__(self, what: str, trial: Trial) -> None:
        if self._quiet:
            return
        from swell.domain.words import many

        value = "no value" if trial.value is None else f"{self._metric} {trial.value:.5g}"
        epochs = many(trial.epochs, "epoch")
        line = {
            "started": f"started with {_spoken(trial)}",
            "pruned": f"given up after {epochs}: {value}",
            "complete": f"complete: {value}",
            "fail": f"failed: 'swell logs {trial.job_id}' shows why",
        }[what]
        click.echo(f"trial {trial.number}: {line}")


def _spoken(trial: Trial) -> str:
    return " ".join(
        f"{name}={f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in trial.parameters.items()
    )


def _show(study: Study, sweep: Sweep) -> None:
    names = list(sweep.parameters)
    table = new_table(["trial", *names, sweep.metric, "epochs", "state", "job"], right=["trial", "epochs"])
    sign = 1.0 if sweep.direction == "minimize" else -1.0
    order = {"complete": 0, "pruned": 1}
    shown = sorted(
        study.trials(),
        key=lambda t: (order.get(t.state, 2), sign * t.value if t.value is not None else 0.0),
    )
    for trial in shown:
        values = [trial.parameters.get(name, "") for name in names]
        table.add_row(
            str(trial.number),
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values),
            "-" if trial.value is None else f"{trial.value:.5g}",
            str(trial.epochs),
            "given up" if trial.state == "pruned" else trial.state,
            trial.job_id or "-",
        )
    print_rich(table)
    best = study.best()
    if best is None:
        click.echo(f"No trial told its {sweep.metric}: the script does so with job.log({sweep.metric}=...).")
    else:
        click.echo(f"Best: trial {best.number} with {_spoken(best)}")


def draw(study: Study, sweep: Sweep) -> str:
    """All trials' metric over their epochs, as SVG."""
    from swell.report import svg

    drawn = [
        svg.ChartLine(f"trial {number}", list(curve), list(curve.values()))
        for number, curve in study.curves().items()
        if curve
    ]
    return svg.lines(
        f"{sweep.metric} of each trial by epoch",
        drawn,
        label_x=lambda x: f"{x:g}",
        label_y=lambda y: f"{y:.3g}",
    )
