"A small version of `load_check.py`, for every day."
import pytest

from load_check import check
from served import Served


@pytest.mark.parametrize('flags', [[], ['--num-blocks', 24, '--max-num-seqs', 7]], ids=['roomy', 'crowded'])
def test_load_with_clients_that_hang_up(tiny, flags):
    with Served(tiny, '--dtype', 'float32', '--block-size', 8, *(flags or ['--num-blocks', 512])) as s:
        report = check(s, clients=40, seconds=5, distinct=12)
        assert report['ok'], report
        if flags: assert report['preemptions'] > 0
    assert 'Traceback' not in s.log, s.log[-2000:]
