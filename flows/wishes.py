"""What people wish of a running pool: engines that are to join it or to leave it, by URL.

Contract: wishes are numbered records of the run, so every attempt heeds all of them, and the last about an engine counts.
"""

import re
import time
from collections.abc import Mapping, Sequence

from storage.objects import ObjectStore
from storage.pool import PoolWish, read_pool_wishes, wished

ENGINE_URL = re.compile(r"https?://[^/\s]+")


# Between two looks at the store.
WISH_SECONDS = 2.0


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


class Wishes:
    """Those of one run, as the flow reads them."""

    def __init__(self) -> None:
        self._read = 0
        self._due = 0.0

    def are_due(self) -> bool:
        """Whether it is time to look for new ones."""
        return time.monotonic() >= self._due

    def new(self, store: ObjectStore) -> Mapping[str, bool]:
        """URL → whether its engine is wanted, of the wishes since the last call; the first time all of them."""
        wishes = read_pool_wishes(store, after=self._read - 1)
        self._read += len(wishes)
        self._due = time.monotonic() + WISH_SECONDS
        return wished(wishes)
