"A small version of `load_check.py`, for every day."
import signal

import pytest

from load_check import check, check_end
from served import Served, slow_down


@pytest.mark.parametrize('flags', [[], ['--num-blocks', 24, '--max-num-seqs', 7]], ids=['roomy', 'crowded'])
def test_load_with_clients_that_hang_up(tiny, flags):
    with Served(tiny, '--dtype', 'float32', '--block-size', 8, *(flags or ['--num-blocks', 512])) as s:
        report = check(s, clients=40, seconds=5, distinct=12)
        assert report['ok'], report
        if flags: assert report['preemptions'] > 0
    assert 'Traceback' not in s.log, s.log[-2000:]


@pytest.mark.parametrize('end', [signal.SIGTERM, signal.SIGKILL], ids=['SIGTERM', 'SIGKILL'])
def test_a_server_that_is_ended_under_load(tiny, end):
    report = check_end(lambda: Served(tiny, '--dtype', 'float32', '--block-size', 8, '--num-blocks', 512, patch=slow_down(.02)), clients=40, end=end, after=1, distinct=12)
    assert report['ok'], report
