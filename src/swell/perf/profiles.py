"""Sets of profiles: how they are found, how their format is recognised, how they are loaded.

A path may hold any of
- a directory per model with placements.csv, scalability.csv and validation-<batch>.csv (Pollux's format),
- directories throughputs_<GPU type>/ with one CSV per model, or such CSVs themselves (ElasticFlow's format),
- a JSON file of models (ours; see `swell.perf.modelled`).
Without a path, the profiles that ship with swell are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swell.domain import InputError, nearest
from swell.perf.epochs import Epochs
from swell.perf.measured import MeasuredCounts, MeasuredPlacements
from swell.perf.modelled import ModelProfile, Training
from swell.perf.profile import Profile

__all__ = [
    "Epochs",
    "MeasuredCounts",
    "MeasuredPlacements",
    "ModelProfile",
    "Profile",
    "ProfileSet",
    "Training",
]

SHIPPED = Path(__file__).with_name("default_profiles.json")
VERSION = 1
"""Version of the JSON form."""


class ProfileSet:
    """Profiles by name."""

    def __init__(self, profiles: Iterable[Profile], source: str = "given") -> None:
        self.source = source
        """Where they come from, for messages and reports."""
        self._profiles = {profile.name: profile for profile in profiles}
        self._aliases = {
            alias: profile
            for profile in self._profiles.values()
            if isinstance(profile, ModelProfile)
            for alias in profile.aliases
        }

    def __len__(self) -> int:
        return len(self._profiles)

    def __iter__(self) -> Iterator[Profile]:
        return iter(self._profiles.values())

    def __contains__(self, model: object) -> bool:
        return model in self._profiles or model in self._aliases

    @property
    def names(self) -> list[str]:
        """The names of the profiles, aliases left out."""
        return list(self._profiles)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """All GPU types that any of them was measured on."""
        return tuple(dict.fromkeys(kind for profile in self for kind in profile.gpu_types))

    def get(self, model: str) -> Profile:
        """The profile of a model, by its name or an alias."""
        profile = self._profiles.get(model) or self._aliases.get(model)
        if profile is None:
            known = [*self._profiles, *self._aliases]
            raise InputError(
                f"no performance profile for model '{model}' in {self.source}."
                f"{nearest(model, known)} Known: {', '.join(sorted(self._profiles))}",
                field="model",
            )
        return profile

    @classmethod
    def load(cls, path: Path | None = None) -> ProfileSet:
        """Load the profiles at a path, whatever their format; those that ship with swell for None."""
        from swell.perf import tables

        if path is None:
            return cls(_read_json(SHIPPED), "the profiles that ship with swell")
        if not path.exists():
            raise InputError(f"profiles '{path}' do not exist", field="profiles")
        if path.is_file():
            if path.suffix == ".json":
                return cls(_read_json(path), str(path))
            return cls(tables.read_counts({tables.ANY: [path]}), str(path))
        found = tables.find(path)
        if found is None:
            raise InputError(
                f"profiles '{path}': no directories with placements.csv, no throughputs_<GPU type>/,"
                " no CSV files that start with global_batch_size",
                field="profiles",
            )
        return cls(found, str(path))

    def save(self, path: Path) -> None:
        """Write the profiles in our JSON form, which only profiles that are models have."""
        models = [profile for profile in self if isinstance(profile, ModelProfile)]
        if len(models) != len(self):
            raise InputError("only profiles that are models can be written; fit the measured ones first")
        content = {"version": VERSION, "profiles": [profile.to_json() for profile in models]}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _read_json(path: Path) -> list[ModelProfile]:
    try:
        content: Any = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise InputError(
                f"{path}: version {content['version']!r}, this swell reads {VERSION}", field="version"
            )
        return [ModelProfile.from_json(raw) for raw in content["profiles"]]
    except InputError as error:
        raise InputError(f"{path}: {error}", field=error.field) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a file of profiles: {error}", field="profiles") from error
