"""What people wish of a running pool: engines that are to join it or to leave it, by URL."""

import re
from collections.abc import Sequence

from storage.pool import PoolWish

ENGINE_URL = re.compile(r"https?://[^/\s]+")


class WishRefused(ValueError):
    """A wish that says nothing, or that no pool could fulfil."""


def pool_wish(add: Sequence[str], remove: Sequence[str]) -> PoolWish:
    """A wish for engines by URL. Raise WishRefused for one that says nothing, or that no engine could have."""
    add, remove = (tuple(url.rstrip("/") for url in urls) for urls in (add, remove))
    for url in (*add, *remove):
        if not ENGINE_URL.fullmatch(url):
            raise WishRefused(f"{url!r} is not the address of an engine; give it as http://host:port")
    if not add and not remove:
        raise WishRefused("no engine is named; give its URL to --add or to --remove")
    if both := sorted(set(add) & set(remove)):
        raise WishRefused(f"{both[0]} cannot be added and removed at once; give it to --add or to --remove")
    return PoolWish(add, remove)
