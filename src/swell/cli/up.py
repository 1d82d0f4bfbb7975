"""`swell up` and `swell down`: the control plane of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import BYTES, DURATION, home_option, json_option, print_json

if TYPE_CHECKING:
    from swell.control.plane import ControlPlane

UP_EPILOG = """\b
On Ray:
  swell up -d --engine ray                              start a Ray for swell, on this machine
  swell up -d --engine ray --address auto               use the Ray that this machine belongs to
  swell up -d --engine ray --address 10.0.0.5:6379      use the Ray at this address
  swell up -d --engine ray --address ray://gpu-head:10001
  swell up -d --engine ray --autoscale 0:3x1 --provider local     rent up to 3 nodes as the queue needs them

\b
Example:
  swell up -d --slots 2
"""
DOWN_EPILOG = """\b
Example:
  swell down
"""
_FOR_LOCAL = ("nodes", "slots", "run_as")
_FOR_RAY = (
    "address",
    "ray_resource",
    "spares",
    "encrypt",
    "spare_memory",
    "workdir_limit",
    "autoscale",
    "provider",
)


@click.command(epilog=UP_EPILOG)
@click.option(
    "--slots", type=click.IntRange(1), help="Slots for workers [default: the GPUs, else the cores]."
)
@click.option(
    "--per-gpu",
    type=click.IntRange(1, 64),
    help="Slots for each GPU: so many workers share one, each within its part of the memory [default: 1].",
)
@click.option(
    "--nodes",
    metavar="NxS[:TYPE]",
    help="Pretend to be several nodes: 2x4 is two nodes of four slots, 2x4:t4,1x4:a100 three of two types.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where workers live: on this machine, or on a Ray cluster.",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Ray: auto, HOST:PORT or ray://HOST:PORT [default: start a Ray for swell].",
)
@click.option("--ray-resource", metavar="NAME", help="Ray: what a slot is [default: a GPU, else a CPU].")
@click.option(
    "--spares/--no-spares", default=None, help="Ray: keep a prepared process on each node [default: yes]."
)
@click.option(
    "--encrypt/--no-encrypt", default=None, help="Ray: encrypt what goes between hosts [default: yes]."
)
@click.option("--spare-memory", type=BYTES, help="Ray: most memory of a prepared process [default: 1GiB].")
@click.option("--workdir-limit", type=BYTES, help="Ray: largest workdir of a job [default: 200MiB].")
@click.option(
    "--autoscale",
    metavar="MIN:MAXxSLOTS",
    help="Ray: rent so many nodes of so many slots as they are worth it, such as 0:8x4,price=3,budget=20.",
)
@click.option(
    "--provider",
    type=click.Choice(["local", "ray"]),
    help="Who provides rented nodes: this machine, to try it, or Ray's own autoscaler [default: ray].",
)
@click.option(
    "--policy", metavar="NAME", help="Policy, one of `swell policies` [default: as last time, at first tide]."
)
@click.option(
    "--round", "round_s", type=DURATION, help="Length of the policy's rounds [default: the policy's]."
)
@click.option(
    "--store",
    metavar="URL",
    envvar="SWELL_STORE",
    help="postgresql://... or a path [default: $SWELL_STORE, else store.db in the home].",
)
@click.option(
    "--pass-env", metavar="NAME", multiple=True, help="Give jobs this variable of swell's own environment."
)
@click.option(
    "--run-as",
    metavar="ACCOUNT",
    help="Run jobs as this account, or 'submitter': as their owner's (root only).",
)
@click.option(
    "--wall/--no-wall",
    default=True,
    show_default=True,
    help="Hide the home and other jobs from each job, where the machine can.",
)
@click.option("--jobs-per-user", type=click.IntRange(1), help="Most jobs of a user that are not over.")
@click.option("--running-per-user", type=click.IntRange(1), help="Most jobs of a user that run at a time.")
@click.option(
    "--slots-per-user", type=click.IntRange(1), help="Most slots of a user's running jobs together."
)
@click.option(
    "--submissions-per-minute", type=click.IntRange(1), help="Most submissions of a user in a minute."
)
@click.option("--time-limit", "time_limit_s", type=DURATION, help="Longest that any job may run, such as 7d.")
@click.option(
    "--keep", "keep_s", type=DURATION, default="30d", show_default=True, help="How long ended jobs are kept."
)
@click.option(
    "--keep-size",
    "keep_bytes",
    type=BYTES,
    help="How much ended jobs' directories may use [default: no limit].",
)
@click.option("--end-unknown", is_flag=True, help="End jobs that run here and are not in the store.")
@click.option(
    "--ha",
    is_flag=True,
    help="One of several control planes on one Postgres store: wait while another leads, take over from it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on [default: 7373, or a free one]."
)
@click.option("--tls-cert", "cert", type=click.Path(path_type=Path), help="TLS certificate (PEM).")
@click.option(
    "--tls-key", "key", type=click.Path(path_type=Path), help="Private key of the certificate (PEM)."
)
@click.option("--insecure", is_flag=True, help="Allow other machines to connect without TLS.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background.")
@click.option("--json", "as_json", is_flag=True, help="With -d: print URL, process and home as JSON.")
@home_option
def up(*, detach: bool, as_json: bool, home: str | None, **given: Any) -> None:
    """Start the control plane, with this machine's GPUs (or CPU slots) or a Ray cluster to run jobs on.

    It can be stopped, killed and started again at any time: accepted jobs are on disk, running jobs go on.
    """
    from swell.api.home import home_dir
    from swell.api.server import check_binding
    from swell.cli._platform import Settings, running_pid, serve, start_in_background
    from swell.domain import SwellError

    given = {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None
    }
    _check(given)
    where = home_dir(home)
    settings = Settings(home=where, **given)
    if settings.ha:
        from swell.cli import _platform

        _platform.check_shared(settings)
    if not detach:
        serve(settings, _announcer(), _stand_by)
        click.echo(
            "The control plane has stopped. Jobs go on: 'swell up' finds them, 'swell down' stops them."
        )
        return
    check_binding(settings.host, settings.cert, settings.key, settings.insecure)
    pid = None if settings.ha else running_pid(where)
    if pid is not None:
        raise SwellError(
            f"a control plane is running for {where} already (process {pid}): 'swell down' stops it"
        )
    url, pid = start_in_background(_words(given), where, _absolute(settings.store))
    if as_json:
        print_json({"url": url, "pid": pid, "home": str(where)})
        return
    click.echo(f"swell is up at {url} (its log: {where / 'server.log'})")
    if given.get("engine") == "ray":
        from swell.cli.doctor import ray_in_clear

        if trouble := ray_in_clear(where):
            click.echo(f"  {trouble}")
    _next_steps(url)


def _check(given: Mapping[str, Any]) -> None:
    """Refuse options that do not go together, and options of one engine with the other."""
    from swell.cli._platform import check_rented, need_ray
    from swell.domain import InputError

    if "nodes" in given and "slots" in given:
        raise InputError("give either --nodes or --slots, not both", field="nodes")
    on_ray, address = given["engine"] == "ray", given.get("address")
    for name in _FOR_LOCAL if on_ray else _FOR_RAY:
        if name not in given:
            continue
        flag = f"--{name.replace('_', '-')}"
        if on_ray:
            raise InputError(f"{flag} is for the local engine: leave it out with Ray", field=name)
        raise InputError(f"{flag} needs --engine ray", field=name)
    if address is not None and address != "auto":
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InputError(
                f"address must be auto, HOST:PORT or ray://HOST:PORT, got '{address}'", field="address"
            )
    check_rented(given.get("autoscale"), given.get("provider"), address, given.get("spares"))
    if on_ray:
        from swell.engines.ray.places import check_per_gpu

        check_per_gpu(given.get("per_gpu", 1), given.get("ray_resource"), rents="autoscale" in given)
        need_ray()


def _words(given: Mapping[str, Any]) -> list[str]:
    """What was given, as words of a command line, except for the store."""
    words: list[str] = []
    for option in up.params:
        value = given.get(option.name or "")
        if value is None or option.name == "store":
            continue
        if isinstance(value, bool):
            words += option.opts[:1] if value else option.secondary_opts[:1]
        else:
            unit = "s" if option.type is DURATION else ""
            for one in value if isinstance(value, tuple) else (value,):
                words += [option.opts[0], f"{one}{unit}"]
    return words


def _absolute(store: str | None) -> str | None:
    return store if store is None or "://" in store else str(Path(store).absolute())


def _announcer() -> Callable[[str, ControlPlane, list[Path]], None]:
    """Prints that the control plane is up, and from then on its events; what to do next only once."""
    announced = False

    def announce(url: str, plane: ControlPlane, new_tokens: list[Path]) -> None:
        nonlocal announced
        _show(url, plane, new_tokens)
        if not announced:
            _next_steps(url)
        announced = True

    return announce


def _show(url: str, plane: ControlPlane, new_tokens: list[Path]) -> None:
    """Print that the control plane is up, and from then on its events."""
    from swell.cli._common import line, subject
    from swell.domain import Event, EventKind
    from swell.domain.words import many

    rented, slots = plane.nodes.autoscaler(), many(sum(node.gpus for node in plane.nodes.states()), "slot")
    if rented is not None:
        slots = f"{rented.least} to {rented.most} rented nodes"
    click.echo(f"swell is up at {url}: {slots}, policy {plane.policy()}. Ctrl-C stops it; jobs go on.")
    for path in new_tokens:
        click.echo(f"  a token for the role '{path.name}' was written to {path}")

    def tell(_: int, event: Event) -> None:
        if event.kind is EventKind.PROGRESS:
            return  # every few seconds for each job: `swell top` shows it better
        about = subject(event.job_id, event.node, event.data)
        click.echo(line(event.time_s, event.kind.value, about, dict(event.data)))

    plane.subscribe(tell)


def _stand_by(url: str, name: str) -> None:
    click.echo(f"{name} is up at {url} and leads when no other control plane does. Ctrl-C stops it.")


def _next_steps(url: str) -> None:
    click.echo(
        "\nNext:\n  swell submit train.py     submit a script\n  swell top                 watch\n"
        f"  swell dashboard           watch in a browser: {url}/\n"
    )


def _wait_for(count: int) -> None:
    if count:
        click.echo(f"Waiting for {count} {'job' if count == 1 else 'jobs'} to save and stop ...")


@click.command(epilog=DOWN_EPILOG)
@click.option("--keep-jobs", is_flag=True, help="Do not stop running jobs.")
@click.option("--plane", metavar="NAME", help="With --ha: stop only the control plane of this name.")
@json_option
@home_option
def down(keep_jobs: bool, plane: str | None, as_json: bool, home: str | None) -> None:
    """Stop the control plane of this machine. Running jobs save their state and stop, unless --keep-jobs.

    Nothing is lost either way: after the next `swell up` every job goes on where it was. A Ray that
    `swell up` started ends too; any other Ray cluster is left alone. If another control plane of the
    home runs (`swell up --ha`), it takes over at once, and jobs go on.
    """
    from swell.api.home import home_dir
    from swell.cli._platform import others_run, stop, stop_jobs, stop_planes, stop_ray
    from swell.domain import SwellError

    where = home_dir(home)
    stopped = stop_planes(where, plane)
    was_up = bool(stopped) or (plane is None and stop(where))
    if was_up and not as_json:
        click.echo("The control plane has stopped.")
    if stopped and not keep_jobs and others_run(where):
        keep_jobs = True
        if not as_json:
            click.echo("Jobs go on: another control plane of this home takes over.")
    saved: list[str] = []
    if not keep_jobs and where.is_dir():
        saved = stop_jobs(where, lambda count: None if as_json else _wait_for(count))
    ray_ended = not keep_jobs and where.is_dir() and stop_ray(where)
    if not was_up and not saved and not ray_ended:
        raise SwellError(f"no control plane is running for {where}; 'swell up' starts one")
    if as_json:
        print_json({"home": str(where), "saved": saved})
    elif saved:
        click.echo("The jobs have stopped, and go on with the next 'swell up'.")
    if ray_ended and not as_json:
        click.echo("The Ray that swell had started has stopped.")
