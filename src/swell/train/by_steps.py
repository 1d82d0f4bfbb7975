"""Training by steps, on batches that the script draws by hand (`job.loop`, `job.sample`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swell.train.agent.errors import UsageError
from swell.train.data.loader import ElasticLoader
from swell.train.data.samples import MapDataset
from swell.train.data.sampling import SampleLoader
from swell.train.stepping import Stepper


class BySteps(Stepper):
    """A job whose loop counts steps; `Job` sets the fields."""

    _pending_loaders: dict[str, Any]
    _samples: dict[tuple[int, int, bool], SampleLoader]

    def _mind_room(self, loader: ElasticLoader) -> None:
        raise NotImplementedError

    def loop(self, steps: int) -> Iterator[int]:
        """The steps still to train, up to `steps`; a newcomer or a restarted job begins where the job is.

        Draw the batches inside with `job.sample`. A scheduler is stepped with every step.
        """
        if steps < 0:
            raise UsageError(f"steps: got {steps}, must be at least 0")
        if self._updater.step_scheduler == "epoch":
            self._updater.step_scheduler = "step"
        self._total_steps = steps
        self._enter()
        try:
            while self.steps < steps and not self.enough():
                yield self.steps
                if not self._rehearsing:
                    self._between_steps()
                    continue
                if not self._samples:
                    raise UsageError("job.loop: the loop body never called job.sample")
                self._rehearsed = True
                while not self._join():
                    assert self._turned is not None
                    self.epoch, self._turned = self._turned, None
                for loader in self._samples.values():
                    loader.again()
        except GeneratorExit:
            if self._rehearsing:
                self._quit_rehearsal()
            raise
        finally:
            if not self._rehearsing:
                self._end()

    def sample(self, source: int | MapDataset, batch_size: int, *, replace: bool | None = None) -> Any:
        """This worker's part of the next step's batch: a tensor of numbers below `source`, or samples of it.

        `batch_size` is that of a whole step, over all workers. Numbers are drawn with replacement, as
        `torch.randint` does; samples of a data set without it, so that each comes once in every pass.
        """
        replace = isinstance(source, int) if replace is None else replace
        known = source if isinstance(source, int) else id(source)
        if (known, batch_size, replace) not in self._samples:
            if self.mode != "fixed":
                raise UsageError(f"mode: job.sample needs mode='fixed', and this job has {self.mode!r}")
            name = f"sample{len(self._samples)}"
            me: Any = self
            made = SampleLoader(me, name, source, batch_size, replace=replace, seed=self.seed)
            self._samples[known, batch_size, replace] = self._loaders[name] = made
            self._mind_room(made)
            if name in self._pending_loaders:
                made.load(self._pending_loaders.pop(name))
        return self._samples[known, batch_size, replace].next()
