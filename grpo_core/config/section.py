"""What all sections of the run config have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# JSON, Parquet and floating-point numbers all hold these exactly.
PositiveInt = Annotated[int, Field(gt=0, le=2**53)]


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
