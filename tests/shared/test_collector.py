"""The garbage collector rests while a process imports, and leaves out afterwards what is there then."""

from __future__ import annotations

import contextlib
import gc

from shared.collector import at_rest


def test_it_rests_for_the_block_and_works_again_also_after_an_error() -> None:
    frozen = gc.get_freeze_count()
    try:
        with contextlib.suppress(ImportError), at_rest():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
