"""Python's cycle collector out of the way of a batch.

It stops the program for the objects it looks at: 0.1 s and more for all that torch and transformers have made, and
milliseconds for the prompts of a batch. Meanwhile the GPU has nothing to do.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """No collection: for short work that makes many objects, all of which stay."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


@contextmanager
def collector_frozen() -> Iterator[None]:
    """Collections leave out what exists now; what is made meanwhile is collected as ever.

    Nothing is done for who has frozen objects already, since thawing has no way to tell whose.
    """
    if gc.get_freeze_count():
        yield
        return
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()
