"""Functions and classes that a config names as `module:name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any


def imported(name: str, purpose: str) -> Callable[..., Any]:
    """What `module:name` stands for; the name may have dots.
    Raise ValueError with one sentence that begins with `purpose`."""
    module, _, path = name.partition(":")
    try:
        found = reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{purpose} {name} cannot be imported ({type(error).__name__}: {error}); give module:function on the Python path"
        ) from error
    if not callable(found):
        raise ValueError(f"{purpose} {name} is a {type(found).__name__}, not a function; give module:function")
    return found  # type: ignore[no-any-return]
