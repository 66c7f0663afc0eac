"""The six properties on random workloads: whatever shares the engine, however it is cut, stored and preempted,
a request gets what it gets alone; nothing is left behind; no step is empty; K/V that was not written is NaN throughout."""
import random
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.sampling import child_seed
from ref import drained, greedy, poison

SLOW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
PREFIXES = [[random.Random(i).randrange(3, 290) for _ in range(24)] for i in range(3)]


@st.composite
def requests(draw):
    "A prompt, often with a known beginning, and what is asked."
    prompt = draw(st.sampled_from([[], *PREFIXES]))[:draw(st.integers(0, 24))] + draw(st.lists(st.integers(3, 290), min_size=1, max_size=20))
    seed = draw(st.none() | st.integers(0, 3))
    return dict(prompt=prompt, n=draw(st.integers(1, 10)), seed=seed, samples=1 if seed is None else draw(st.integers(1, 3)), arrive=draw(st.integers(0, 12)),
                stop=draw(st.sampled_from([(), ('a',), ('the', 'e')])), leave=draw(st.none() | st.integers(1, 15)), priority=draw(st.integers(0, 2)))


@st.composite
def engines(draw):
    "Chunk, block and pool sizes, caching, policy."
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    return dict(block_size=block_size, num_blocks=draw(st.integers(-(-60 // block_size), 200 // block_size)),
                max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 17, 256])), max_num_seqs=draw(st.integers(1, 8)),
                enable_prefix_caching=draw(st.booleans()), policy=draw(st.sampled_from(['balanced', 'prefill_first', 'decode_first'])))


def params(r):
    how = dict(temperature=0) if r['seed'] is None else dict(temperature=1, seed=r['seed'], top_p=.9)
    return SamplingParams(n=r.get('samples', 1), max_tokens=r['n'], stop=list(r['stop']), **how)


class World:
    def __init__(self, folder):
        self.folder = str(folder)
        self.single = LLM(self.folder, dtype='float32', attention_backend='torch', block_size=16, num_blocks=8, enable_prefix_caching=False)
        self.alone = lru_cache(None)(self._alone)

    def _alone(self, prompt, n, seed, stop):
        [out] = self.single.generate([list(prompt)], params(dict(n=n, seed=seed, stop=stop)), use_tqdm=False)
        return out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason

    def want(self, r):
        "`(ids, text, reason)` of each sample, made alone"
        return [self.alone(tuple(r['prompt']), r['n'], None if r['seed'] is None else child_seed(r['seed'], i), r['stop']) for i in range(r['samples'])]


@pytest.fixture(scope='module')
def world(tiny): return World(tiny)


def test_alone_is_the_plain_model(world):
    "The yardstick of this file against one full forward per token, without a cache."
    for i in range(8):
        p = PREFIXES[i % 3][:3*i+1]
        assert world.alone(tuple(p), 10, None, ())[0] == greedy(world.single.model, p, 10, world.single.eos_ids)


def run(world, config, workload, backend):
    llm = poison(LLM(world.folder, dtype='float32', attention_backend=backend, **config))
    texts, ids, done, step = {}, {}, {}, 0
    while llm.has_unfinished_requests() or any(r['arrive'] >= step for r in workload):
        for i, r in enumerate(workload):
            if r['arrive'] == step:
                llm.add_request(r['prompt'], params(r), str(i), priority=r['priority'])
                texts[i], ids[i] = [''] * r['samples'], [[] for _ in range(r['samples'])]
            if r['leave'] and step == r['arrive'] + r['leave'] and llm.abort_request(str(i)): done[i] = None
        before = llm.scheduler.has_unfinished
        for d in llm.step():
            texts[int(d.request_id)][d.index] += d.text
            ids[int(d.request_id)][d.index] += d.token_ids
            if d.output: done[int(d.request_id)] = d.output.outputs
        if before:
            work = llm.scheduler.last_output
            assert work.num_batched_tokens or work.preempted or work.outgrown, 'an empty step while work is pending'
        llm.block_manager.check_integrity()
        step += 1
        assert step < 5000, 'the engine does not come to an end'
    drained(llm)
    return texts, ids, done


@pytest.mark.parametrize('backend', ['torch', 'cpu'])
@SLOW
@given(config=engines(), workload=st.lists(requests(), min_size=1, max_size=8))
def test_a_request_gets_what_it_gets_alone(world, backend, config, workload):
    texts, ids, done = run(world, config, workload, backend)
    for i, r in enumerate(workload):
        for k, want in enumerate(world.want(r)):
            if done[i] is None:                                     # it left: what it got so far is a beginning
                assert want[0][:len(ids[i][k])] == ids[i][k] and want[1].startswith(texts[i][k])
            else:
                out = done[i][k]
                assert (out.token_ids, out.text, out.finish_reason) == want and (ids[i][k], texts[i][k]) == want[:2]


@SLOW
@given(bad=st.one_of(st.just(''), st.just([]), st.lists(st.integers(300, 10**9), min_size=1, max_size=3), st.lists(st.integers(-9, -1), min_size=1),
                     st.integers(), st.none(), st.dictionaries(st.sampled_from(['prompt', 'text', 'x']), st.none() | st.just(''), max_size=2),
                     st.lists(st.integers(3, 290), min_size=128, max_size=140)))
def test_malformed_is_refused_and_the_next_is_answered(world, bad):
    with pytest.raises(ValueError): world.single.add_request(bad)
    drained(world.single)
    assert world.single.generate([PREFIXES[0]], params(dict(n=3, seed=None, stop=())), use_tqdm=False)[0].finished
