"""How the learning rate changes over a run: a pure function of the step."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Schedule(BaseModel):
    """A factor of the learning rate at each step.

    `cosine` falls from 1 to `final` along half a wave; `steps` multiplies by `factor` at each step in `at`.
    Both begin by rising in a straight line over `warmup` steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Literal["constant", "cosine", "steps"] = "constant"
    warmup: int = Field(default=0, ge=0, description="steps of rising in a straight line")
    final: float = Field(default=0.0, ge=0, description="cosine: the factor at the end")
    at: tuple[int, ...] = Field(default=(), description="steps: where the factor changes")
    factor: float = Field(default=0.1, gt=0, description="steps: what it is multiplied by")

    @model_validator(mode="after")
    def _nothing_idle(self) -> Schedule:
        used = {"constant": set(), "cosine": {"final"}, "steps": {"at", "factor"}}[self.name]
        for key in ("final", "at", "factor"):
            if key not in used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} means nothing to {self.name}")
        return self

    def at_step(self, step: int, num_steps: int) -> float:
        """The factor of the learning rate at this step of a run of so many."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        match self.name:
            case "constant":
                return 1.0
            case "steps":
                return self.factor ** sum(step >= place for place in self.at)
            case "cosine":
                progress = (step - self.warmup) / max(num_steps - self.warmup, 1)
                return self.final + (1 - self.final) * (1 + cos(pi * min(progress, 1.0))) / 2
