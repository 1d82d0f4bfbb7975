"""`swell up --autoscale`: the rented nodes of a platform on Ray, as its settings ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swell.cloud import Rentable, parse_rentable
from swell.domain import InputError

if TYPE_CHECKING:
    from swell.control.renting import Renting
    from swell.engines.ray.site import RayOptions
    from swell.engines.supervised import SupervisedEngine

_START_S = {"local": 15.0, "ray": 120.0}
"""By provider: how long a node takes to start, if nobody says. Here that is seconds, in a cloud minutes."""
DEFAULT = "ray"


def check_rented(
    autoscale: str | None, provider: str | None, address: str | None, spares: bool | None
) -> None:
    """Refuse what cannot be rented."""
    if autoscale is None:
        if provider is not None:
            raise InputError("--provider needs --autoscale, such as --autoscale 0:3x1", field="provider")
        return
    _rentable(autoscale, provider)
    if provider == "local":
        if address is not None and address.startswith("ray://"):
            raise InputError(
                "--provider local needs a Ray on this machine: give its address as HOST:PORT", field="address"
            )
    elif address is None:
        raise InputError(
            "--provider ray needs the --address of a Ray cluster that has an autoscaler; to try it on this "
            "machine alone, use --provider local",
            field="provider",
        )
    elif spares:
        raise InputError(
            "--spares cannot be used with --provider ray: Ray never takes a node for idle that has a "
            "prepared process",
            field="spares",
        )


def with_rented(options: RayOptions, autoscale: str, provider: str | None) -> RayOptions:
    """The engine's options with the nodes that may be rented."""
    from swell.engines.ray.places import RentedNodes

    rentable, by_ray = _rentable(autoscale, provider), provider != "local"
    resource = options.resource or ("GPU" if by_ray else "CPU")
    nodes = RentedNodes(
        nodes=rentable.terms.most_nodes,
        slots=rentable.offer.gpus_per_node,
        gpu_type=rentable.gpu_type or ("cpu" if resource == "CPU" else "gpu"),
        any_host=by_ray,
    )
    # Ray never takes a node for idle that has a prepared process, so its autoscaler would keep all nodes.
    return replace(options, rented=nodes, resource=resource, spares=options.spares and not by_ray)


def make_renting(autoscale: str | None, provider: str | None, engine: SupervisedEngine) -> Renting | None:
    """The control plane's part that rents nodes, if it is to rent any."""
    if autoscale is None:
        return None
    from swell.control.renting import Renting
    from swell.engines.ray.providers import LocalProvider, RayProvider
    from swell.engines.ray.site import RaySite

    site = engine.site
    assert isinstance(site, RaySite)
    rentable = _rentable(autoscale, provider)
    make = LocalProvider if provider == "local" else RayProvider
    return Renting(make(site, rentable.offer), rentable.terms, site.rented_names)


def _rentable(autoscale: str, provider: str | None) -> Rentable:
    return parse_rentable(autoscale, _START_S[provider or DEFAULT])
