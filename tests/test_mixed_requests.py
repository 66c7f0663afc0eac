"Mixed requests on the demo model in fp32: transformers' tokens, one by one, however they are cut, stored, shared and preempted."
import random

import pytest

from minivllm import LLM, SamplingParams

TEXTS = ['The history of computing began long before there were computers. ', '从前有座山，山上有座庙，庙里有个老和尚。', 'def f(x):\n    return x + 1\n',
         'It was the best of times, it was the worst of times, ', '🙂 emoji, naïve café, Ωmega. ', '1, 2, 3, 4, 5, 6, 7, ']


@pytest.fixture(scope='module')
def workload(greedy_hf, demo_hf):
    "64 prompts of 1 to 48 tokens, half of them with a common beginning, each with 8 to 24 tokens to generate, and what transformers says."
    rng, encode = random.Random(7), lambda t: demo_hf[1](t).input_ids
    shared, out = encode(TEXTS[0] * 6)[:24], []
    for i in range(64):
        ids = encode(rng.choice(TEXTS) * 9)[rng.randrange(4):][:rng.randrange(1, 25)]
        out.append((shared + ids if i % 2 else ids, rng.randrange(8, 25)))
    return [(ids, n, greedy_hf(ids, n)) for ids, n in out]


def check(workload, **config):
    with LLM(dtype='float32', **config) as llm:
        outs = llm.generate([ids for ids, *_ in workload], [SamplingParams(temperature=0, max_tokens=n) for _, n, _ in workload], use_tqdm=False)
        wrong = [i for i, (o, (*_, want)) in enumerate(zip(outs, workload)) if o.outputs[0].token_ids != want]
        assert not wrong
        llm.block_manager.check_integrity()
        return sum(o.metrics.num_preemptions for o in outs), sum(o.num_cached_tokens for o in outs)


@pytest.mark.parametrize('block_size', [1, 16, 32])
@pytest.mark.parametrize('chunk', [16, 17, 2048])
def test_chunks_and_blocks(workload, chunk, block_size):
    "Prompts are read in pieces of at most `chunk` tokens, or whole: then all in one step, before any block is there to be shared."
    _, hits = check(workload, max_num_batched_tokens=chunk, block_size=block_size, enable_prefix_caching=chunk != 17)
    assert bool(hits) == (chunk == 16)


def test_one_token_at_a_time(workload):
    check(workload[:24], max_num_batched_tokens=1, block_size=16)


@pytest.mark.parametrize('cache', [True, False])
def test_preemption(workload, cache):
    preemptions, _ = check(workload, num_blocks=24, block_size=4, enable_prefix_caching=cache)
    assert preemptions >= 20


def test_two_engines_interleaved(workload):
    "Two engines in one process, with different block sizes, in turn: the same tokens as alone."
    a, b = LLM(dtype='float32', block_size=16, num_blocks=64), LLM(dtype='float32', block_size=4, num_blocks=256)
    streams = [(llm.stream(ids, SamplingParams(temperature=0, max_tokens=n)), [], want) for (ids, n, want), llm in zip(workload[:6], (a, b) * 3)]
    left = list(streams)
    while left:
        for s in list(left):
            if (d := next(s[0], None)) is None: left.remove(s)
            else: s[1].extend(d.token_ids)
    for _, got, want in streams: assert got == want
