"""Sharded models: each worker's own part of parameters, gradients and optimizer state.

FSDP2 makes parameters DTensors. Of those, only the part that is here (the *shard*) is summed with that of the
counterparts in other replicas, and handed to newcomers. A checkpoint holds whole tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from swell.train.agent.errors import UsageError
from swell.train.replicas.group import Replica
from swell.train.sync.memory import FlatModel, Layout, local

if TYPE_CHECKING:
    from swell.train.state.checkpoint import Allocate


class Whole:
    """Every worker has the whole model."""

    sharded = False
    targets: Allocate | None = None
    """Memory for the tensors of a checkpoint; None for the usual."""

    def flat(self, model: nn.Module, rank_buffers: dict[str, Tensor] | None) -> FlatModel:
        """The model's gradients as flat vectors."""
        return FlatModel(model, rank_buffers)

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with the parts of its tensors that this worker has."""
        return state

    def gathered(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """A state with whole tensors, where `keep`; all workers of a replica must call this together."""
        return state

    def for_optimizer(self, values: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's part of a local state, as the optimizer takes it."""
        return values


def form_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica, mode: str, scaler: Any
) -> Whole:
    """How this model is held; UsageError if it cannot be trained so."""
    if replica.size == 1 and not any(hasattr(p, "to_local") for p in model.parameters()):
        return Whole()
    from swell.train.replicas import checks  # only now: torch takes a while to import FSDP

    checks.check(model, optimizer, replica, mode, scaler)
    return Sharded(model, optimizer, replica)


# ---------------------------------------------------------------------- sharded models


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP add the gradients of a replica's workers, where it would take their mean.

    Losses are scaled by the samples of the whole step, so that the sum over all workers is the mean.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only add


class ShardedFlat(FlatModel):
    """This worker's shard of gradients, and the buffers, as flat vectors."""

    sharded = True

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        super().__init__(model)
        self.stride, self.position = replica.size, replica.position
        self._common = f"{self.layout.digest}/{replica.size}"
        self._replica = replica
        self.layout = Layout({n: local(p) for n, p in self.parameters.items()}, self.buffers)
        self._sums: list[Tensor] | None = None

    @property
    def digest(self) -> str:
        """Facts in which all workers must agree: the whole tensors, and the workers of a replica."""
        return self._common

    @torch.no_grad()
    def gather(self, weight: float) -> list[int]:
        """Copy the shard's gradients into the input, and the buffers of the replica's workers."""
        memory, unused = self.memory(), []
        for index, parameter in enumerate(self.parameters.values()):
            if parameter.grad is None:
                unused.append(index)
                memory.grad_in[index].zero_()
            else:
                memory.grad_in[index].copy_(local(parameter.grad))
        if memory.buffer_in:
            mean = torch.cat([b.detach().reshape(-1).double() for b in self.buffers.values()]) * weight
            if self.stride > 1:
                dist.all_reduce(mean)
            for place in memory.buffer_in:
                place.copy_(mean[: place.numel()].view(place.shape))
                mean = mean[place.numel() :]
        return unused

    def adopt(self, unused: set[int]) -> None:
        """Make the summed shards the parameters' gradients, and the summed buffers the model's."""
        memory = self.memory()
        if self._sums is None:
            pairs = zip(self.parameters.values(), memory.grad_out, strict=True)
            self._sums = [like(parameter, part) for parameter, part in pairs]
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = None if index in unused else self._sums[index]
        if memory.buffer_out:
            with torch.no_grad():
                torch._foreach_copy_(list(self.buffers.values()), memory.buffer_out)


def like(model: Tensor, part: Tensor) -> Tensor:
    """The tensor of which `part` is the shard, cut like `model`; `part` itself if `model` is not sharded."""
    if not isinstance(model, DTensor):
        return part
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


class Sharded(Whole):
    """Each worker of a replica has its shard of the model."""

    sharded = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
        self._optimizer = optimizer
        self._replica = replica
        self.targets = Targets(model, optimizer)
        sum_gradients(model)

    def flat(self, model: nn.Module, rank_buffers: dict[str, Tensor] | None) -> FlatModel:
        """The gradients of this worker's shard as flat vectors."""
        return ShardedFlat(model, self._replica)

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with the shards that are here."""
        _check_state(self._optimizer)
        mapped: dict[str, Any] = _mapped(state, local)
        return mapped

    def gathered(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """A state with whole tensors, gathered one by one into the memory of the host where `keep`."""
        _check_state(self._optimizer)

        def whole(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
            return full.cpu() if keep else torch.empty(0)

        mapped: dict[str, Any] = _mapped(state, whole)
        return mapped

    def for_optimizer(self, values: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state of shards, with the DTensors that the optimizer works on."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {}
        for index, saved in values["state"].items():
            owner = parameters[int(index)]
            state[index] = {k: like(owner, v) if _is_shard(v, owner) else v for k, v in saved.items()}
        return {**values, "state": state}


def _is_shard(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == local(parameter).shape


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state is cut in another way than the parameters."""
    parameter: Any
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, DTensor):
                continue
            if value.shape != parameter.shape or value.placements != parameter.placements:
                raise UsageError(
                    f"optimizer: its {key} is not cut like the parameter that it belongs to, so it cannot "
                    "travel to other replicas; use an optimizer with state of the parameters' shapes"
                )


class Targets:
    """Where the tensors of a checkpoint are read to: of what is sharded, only the part that is here."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = {f"model.{name}": p for name, p in model.named_parameters()}
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Memory for the tensor that is saved under this key."""
        owner: Any = self._model.get(key)
        if owner is None and key.startswith("optimizer.state."):
            number = key.split(".")[2]
            owner = self._parameters[int(number)] if number.isdigit() else None
        if not isinstance(owner, DTensor) or tuple(owner.shape) != tuple(shape):
            return torch.empty(shape, dtype=dtype)
        part = local(owner)
        return like(owner, torch.empty(part.shape, dtype=dtype, device=part.device))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _mapped(v, change)) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change) for v in value)
    return value
