"""The soak script, for a moment."""

from tests.soak import Soak


def test_soak_loses_nothing(tmp_path):
    soak = Soak(tmp_path, seed=4, cases=30)
    for _ in range(2):
        ticks = iter(range(30))
        soak.run_engine(lambda ticks=ticks: next(ticks, None) is not None)
    assert soak.num_lost() == 0
    assert soak.figures["engines"] == 2
    assert min(soak.figures[name] for name in ("answered", "aborted", "faults", "refused")) > 0
