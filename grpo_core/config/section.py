"""What all sections of the run config have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# JSON, Parquet and floating-point numbers all hold these exactly.
PositiveInt = Annotated[int, Field(gt=0, le=2**53)]
# The name may have dots.
IMPORTABLE = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _name(value: Any) -> Any:
    """Refuse in a sentence what is no name, and leave what is no text to the type."""
    text = value if isinstance(value, str) else ""
    if callable(value) or text.lstrip().startswith("lambda") or "<" in text:
        raise ValueError(
            "a lambda, a function within a function or a function object has no name by which another process could "
            "import it; define it in a module and give module:function"
        )
    if isinstance(value, str) and not re.match(IMPORTABLE, value):
        raise ValueError("it does not say where a function is found; give module:function, such as my_rewards:brevity")
    return value


def by_its_name(value: Any) -> Any:
    """A section whose key `function` may be given alone."""
    return {"function": value} if isinstance(value, str) or callable(value) else value


# Something that every process of a run can import: `module:name`.
Importable = Annotated[str, BeforeValidator(_name), Field(pattern=IMPORTABLE)]
